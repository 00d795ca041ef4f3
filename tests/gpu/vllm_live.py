"""A running vLLM on the first GPUs, and the trainer on the last one, for the tests of refits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous

from .vllm_trainer import Trainer

PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64], [3 + i % 1000 for i in range(160)]]
EAGER = {"enforce_eager": True}
CUDA_GRAPHS: dict[str, Any] = {
    # cudagraph_mode FULL with async scheduling gave other tokens each time on vLLM 0.21, before any refit.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
    "async_scheduling": False,
}


@contextmanager
def engine_environment(further: Mapping[str, str]) -> Iterator[None]:
    """What a process that starts an engine needs; its GPU memory goes with the engine, which is a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    ours = {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # A fork of this process, where torch has computed on many threads, would wait for them for ever.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**ours, **further}.items():
            patch.setenv(key, value)
        yield


class LiveEngine:
    """An engine that was started from a checkpoint, and meets the trainer.

    Args:
        path: of the checkpoint.
        trainer: which holds its weights by now.
        config: of refits, which the trainer has, too.
        arguments: of ``LLM``, beside those that make it small.
    """

    def __init__(self, path: str, trainer: Trainer, config: RefitConfig, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        from rlrefit.workers.engines.vllm.driver import VllmDriver

        self.llm = LLM(
            path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=16,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=1 << 28,
            enable_flashinfer_autotune=False,
            worker_extension_cls="tests.gpu.vllm_extension.PoisonExtension",
            **arguments,
        )
        self.driver = VllmDriver(self.llm)
        self.version = -1
        self._config = config
        self._ranks = arguments.get("tensor_parallel_size", 1)
        self._trainer = trainer
        self._digests = "refit_parameter_digests"
        self._server: Any = None

    def meet(self) -> int:
        """A new epoch; the number of weights on the misc path."""
        if self._server is not None:
            self._server.close()
        self._server = open_rendezvous("127.0.0.1", 1, self._ranks)
        self._trainer.commands.put(self._server.rendezvous)
        try:
            self.driver.join_refit(self._server.rendezvous.to_json(), 1, self._config)
        except RuntimeError:
            self._server.close()  # or the trainer would wait for the engine
            assert isinstance(self.sent(), str)
            raise
        found = self.sent()
        assert isinstance(found, int), found
        return found

    def sent(self) -> Any:
        """What the trainer answers."""
        return self._trainer.answer()

    def send(self, index: int) -> None:
        self.version += 1
        self._trainer.commands.put((index, self.version))

    def refit(self, index: int) -> list[dict[str, Any]]:
        self.send(index)
        records = self.driver.refit(self.version)
        sent = self.sent()
        assert isinstance(sent, dict), sent
        return records

    def poison(self) -> None:
        self.llm.collective_rpc("poison")

    def digests(self) -> list[dict[str, str]]:
        return self.llm.collective_rpc(self._digests)

    def generate(self, tokens: int = 24) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        # One by one: which requests a step has together depends on time, and kernels round by what is in a step.
        found = [self.driver.generate([{"prompt_token_ids": p}], parameters)[0] for p in PROMPTS]
        outputs = [f.output.outputs[0] for f in found]
        return [
            (list(o.token_ids), [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]

    def prefilled(self, contexts: Sequence[list[int]]) -> list[list[float]]:
        """What the weights of now say, in one pass and without cached prefixes, of each token but the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0
        )
        found = self.driver.generate([{"prompt_token_ids": c} for c in contexts], parameters)
        return [
            [entry[token].logprob for token, entry in zip(c[1:], f.output.prompt_logprobs[1:], strict=True)]
            for c, f in zip(contexts, found, strict=True)
        ]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


def require_refits_to_another_version_and_back(engine: LiveEngine, most_misc: int = 0) -> None:
    """Two of each give the engine that was started from the weights, from poisoned memory.

    Args:
        engine: that meets a trainer, and has version 0 of two.
        most_misc: bytes that may go over the misc path.
    """
    reference, digests_a = engine.generate(), engine.digests()
    digests_b = None
    for _ in range(2):
        engine.poison()
        records = engine.refit(1)
        assert max(record["bytes_misc"] for record in records) <= most_misc
        assert digests_b in (None, engine.digests())
        digests_b = engine.digests()
        assert digests_b != digests_a
        assert engine.generate() != reference
        engine.poison()
        engine.refit(0)
        assert engine.digests() == digests_a
        assert engine.generate() == reference
