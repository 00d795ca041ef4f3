"""Refits of real vLLM engines: after a refit an engine generates as one that was started from the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_checkpoints import dense_config, moe_config, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.timeout(600)

PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64]]


@dataclass
class Engine:
    """One running vLLM, the two checkpoints, and what it generated and held when it was started from A."""

    llm: Any
    path_a: str
    path_b: str
    tokens_a: list[list[int]]
    digests_a: list[dict[str, str]]

    def tokens(self) -> list[list[int]]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def call(self, method: str, *args: Any) -> list[Any]:
        """The result of every worker, by rank."""
        return self.llm.collective_rpc(method, args=args)

    def digests(self) -> list[dict[str, str]]:
        return self.call("refit_parameter_digests")


@pytest.fixture(scope="module", params=["tied dense TP2", "moe"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }.items():
            patch.setenv(key, value)
        root = tmp_path_factory.mktemp(request.param)
        dense = request.param == "tied dense TP2"
        config = dense_config(tied=True) if dense else moe_config(expert_size=32)
        path_a, path_b = (str(write_checkpoint(root / name, config, seed)) for seed, name in enumerate("ab"))
        from vllm import LLM

        llm = LLM(
            path_a,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=256,
            tensor_parallel_size=2 if dense else 1,
            worker_extension_cls="vllm_probe.ProbeExtension",
        )
        started = Engine(llm, path_a, path_b, [], [])
        started.tokens_a, started.digests_a = started.tokens(), started.digests()
        yield started
        llm.llm_engine.engine_core.shutdown()


def test_refits_there_and_back_generate_as_the_engine_that_was_started_from_the_weights(engine: Engine):
    for routes in engine.call("probe_refit", engine.path_b, 1):
        assert routes["version"] == 1
        assert routes["bulk"] + routes["misc"] == len(read_checkpoint(engine.path_b))
    tokens_b = engine.tokens()
    for held, before in zip(engine.digests(), engine.digests_a, strict=True):
        assert held.keys() == before.keys()
        assert all(held[name] != before[name] for name in held)
    assert tokens_b != engine.tokens_a

    assert all(routes["version"] == 2 for routes in engine.call("probe_refit", engine.path_a, 2))
    assert engine.digests() == engine.digests_a
    assert engine.tokens() == engine.tokens_a


def test_a_refit_gives_what_vllms_own_reload_gives(engine: Engine):
    """Generates for the last time here: on the CPU, vLLM's reload leaves experts computing with copies."""
    engine.call("probe_refit", engine.path_b, 3)
    refit_b, tokens_b = engine.digests(), engine.tokens()
    engine.call("probe_poison")
    engine.call("probe_engine_load", engine.path_b)
    assert engine.digests() == refit_b
    assert engine.tokens() == tokens_b


def test_raw_bytes_of_named_parameters_come_back_from_the_worker(engine: Engine):
    engine.call("probe_refit", engine.path_b, 4)
    name = "model.layers.1.post_attention_layernorm.weight"
    expected = read_checkpoint(engine.path_b)[name].view(torch.uint8).numpy().tobytes()
    assert all(got == {name: expected} for got in engine.call("refit_parameter_bytes", [name]))


def test_the_trace_is_reported_by_route(engine: Engine):
    tensors = read_checkpoint(engine.path_a)
    manifest = [(name, list(tensor.shape), "bfloat16") for name, tensor in tensors.items()]
    for report in engine.call("refit_trace", manifest):
        assert report["bulk"]["model.norm.weight"] == "((0, 64),)"
        assert report["bulk"].keys() | report["misc"].keys() == tensors.keys()
