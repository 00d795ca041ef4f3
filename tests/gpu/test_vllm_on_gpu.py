"""Refits of real vLLM engines on GPUs: TP2, experts, CUDA graphs, sleep, FP8. The trainer is a process on the last GPU.

An engine of each configuration serves all of its tests, since starting it takes longest; what is being started is
printed as it goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from rlrefit.integration.rendezvous import open_rendezvous

from .vllm_checkpoints import write_checkpoint
from .vllm_trainer import CONFIG, Trainer

pytestmark = [
    pytest.mark.gpu,
    # An engine starts within a minute, and the first test that needs it has the rest.
    pytest.mark.timeout(150),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices"),
]

PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64], [3 + i % 1000 for i in range(160)]]
EAGER = {"enforce_eager": True}
FP8: dict[str, Any] = {"fp8": True, "experts": True}
CUTLASS, DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}, {"VLLM_USE_DEEP_GEMM": "1"}
# DeepGEMM's kernels are given linear layers alone, and scales that are powers of two.
E8M0 = FP8 | {"experts": False, "scale": ScaleFormat.UE8M0}
TP2 = EAGER | {"tensor_parallel_size": 2}
# name → (checkpoint, arguments of LLM, environment)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "eager, TP2": ({}, {**EAGER, "tensor_parallel_size": 2, "async_scheduling": True}, {}),
    "experts": ({"experts": True}, {**EAGER, "moe_backend": "triton"}, {}),
    "sleep": ({}, {**EAGER, "enable_sleep_mode": True}, {}),
    "CUDA graphs": (
        {},
        # cudagraph_mode FULL with async scheduling gave other tokens each time on vLLM 0.21, before any refit.
        {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4],
            },
            "async_scheduling": False,
        },
        {},
    ),
    "FP8 blocks": (FP8, EAGER, CUTLASS),
    "FP8 blocks, DeepGEMM": (FP8 | {"experts": False}, EAGER, DEEP_GEMM),
    "FP8 blocks of the trainer": (FP8, EAGER, CUTLASS),
    "FP8 blocks of the trainer, TP2": (FP8, TP2, CUTLASS),
    "FP8 blocks of the trainer, DeepGEMM": (E8M0, EAGER, DEEP_GEMM),
}
# What the trainer holds in BF16, and quantizes for the engine.
TRAINED = frozenset(name for name in CASES if "of the trainer" in name)
# vLLM quantizes these once more as it loads them, so that they have to go through its loader.
RELOADED = frozenset({"FP8 blocks, DeepGEMM"})
# Between log-probabilities of one token under the same weights: BF16, by kernels for decoding and for prompts.
SAME = 0.2
# What other weights differ by, at the least, on one token of many.
OTHER = 1.0


class Scene:
    """An engine on the first GPUs that was started from checkpoint 0, and a trainer on the last one."""

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        checkpoint: dict[str, Any],
        arguments: dict[str, Any],
        *,
        trained: bool,
    ) -> None:
        kind = {"fp8": False} | checkpoint
        self.paths = [write_checkpoint(folder / f"{seed}", seed, **kind) for seed in (0, 1)]
        self._config = replace(CONFIG, trainer_quantize_fp8=trained)
        held = self.paths
        if trained:
            held = [
                write_checkpoint(folder / f"trained_{seed}", seed, **kind | {"fp8": False}) for seed in (0, 1)
            ]
        from vllm import LLM

        from rlrefit.workers.vllm.driver import VllmDriver

        self.llm = LLM(
            self.paths[0],
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
        # vLLM's loader gives blocks whose largest code is 224 half the scale and twice the codes: the same numbers.
        rescaled = kind.get("scale") is ScaleFormat.UE8M0
        self._digests = "value_digests" if rescaled else "refit_parameter_digests"
        self._ranks = arguments.get("tensor_parallel_size", 1)
        self._trainer = trainer
        trainer.commands.put(self._config)
        trainer.commands.put(held)
        self._server: Any = None
        self.version = -1
        self.reference, self.digests_a = self.generate(), self.digests()

    def meet(self) -> int:
        """A new epoch; the number of weights on the misc path."""
        if self._server is not None:
            self._server.close()
        self._server = open_rendezvous("127.0.0.1", 1, self._ranks)
        self._trainer.commands.put(self._server.rendezvous)
        try:
            self.driver.init_refit(self._server.rendezvous.to_json(), 1, self._config)
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


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    found = Trainer()
    yield found
    found.close()


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    checkpoint, arguments, environment = CASES[request.param]
    if torch.cuda.device_count() < arguments.get("tensor_parallel_size", 1) + 1:
        pytest.skip("needs a GPU for each rank of the engine and one for the trainer")
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    root = str(Path(__file__).resolve().parents[2])
    # The engine in a process of its own: its GPU memory goes with it.
    ours = {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # A fork of this process, where torch has computed on many threads, would wait for them for ever.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**ours, **environment}.items():
            patch.setenv(key, value)
        reporter.write_line(f"\nstarting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(
            tmp_path_factory.mktemp("engine"),
            trainer,
            checkpoint,
            arguments,
            trained=request.param in TRAINED,
        )
        reporter.write_line(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_two_refits_give_the_engine_that_was_started_from_the_weights(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    misc = scene.meet()
    case = request.node.callspec.params["scene"]
    # Blackwell's DeepGEMM has scales packed, which only vLLM's loader can do.
    packed = torch.cuda.get_device_capability()[0] >= 10 and "DeepGEMM" in case
    assert (misc > 0) == (case in RELOADED or packed)
    digests_b = None
    for _ in range(2):
        scene.poison()
        scene.refit(1)
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        assert scene.generate() != scene.reference
        scene.poison()
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        assert scene.generate() == scene.reference
    # The same weights once more change nothing, scales that were rounded to powers of two included.
    scene.refit(0)
    assert scene.digests() == scene.digests_a
    assert scene.generate() == scene.reference


@pytest.mark.parametrize("scene", ["eager, TP2", "CUDA graphs"], indirect=True)
def test_tokens_around_a_refit_are_those_of_their_versions(scene: Scene) -> None:
    """Each token that a running request sampled, against one pass of a fresh request over all that it holds."""
    from vllm import SamplingParams

    config = scene.llm.llm_engine.vllm_config
    assert config.scheduler_config.async_scheduling == config.model_config.enforce_eager
    scene.meet()
    scene.refit(0)
    first, tokens = scene.version, 64
    turned: list[int] = []

    def turn() -> None:
        if len(turned) == 8:
            scene.send(1)
            scene.driver.refit(scene.version)
            assert isinstance(scene.sent(), dict)
        turned.append(scene.version)

    parameters = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    found = scene.driver.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, turn)
    outputs = [f.output.outputs[0] for f in found]
    sampled = [
        [entry[token].logprob for token, entry in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
    ]
    contexts = [p + list(o.token_ids) for p, o in zip(PROMPTS, outputs, strict=True)]
    new = [said[-tokens:] for said in scene.prefilled(contexts)]
    scene.refit(0)
    old = [said[-tokens:] for said in scene.prefilled(contexts)]
    for f, values, by_old, by_new in zip(found, sampled, old, new, strict=True):
        [versions] = f.versions
        before = versions.count(first)
        assert 0 < before < tokens
        assert list(versions) == [first] * before + [first + 1] * (tokens - before)
        right = torch.tensor(by_old[:before] + by_new[before:])
        wrong = torch.tensor(by_new[:before] + by_old[before:])
        assert (torch.tensor(values) - right).abs().max() < SAME
        assert (torch.tensor(values[:before]) - wrong[:before]).abs().max() > OTHER
        assert (torch.tensor(values[before:]) - wrong[before:]).abs().max() > OTHER


@pytest.mark.parametrize("scene", ["sleep"], indirect=True)
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_is_refitted_between_its_weights_and_its_kv_cache(level: int, scene: Scene) -> None:
    from rlrefit.integration.errors import EngineDirty, RefitError

    scene.meet()
    scene.refit(1)
    scene.llm.sleep(level)
    scene.send(0)
    with pytest.raises(RefitError, match="asleep"):
        scene.driver.refit(scene.version)
    assert isinstance(scene.sent(), str)
    scene.llm.wake_up(tags=["weights"])
    if level == 2:
        with pytest.raises(EngineDirty):
            scene.driver.serving_version()
    scene.meet()
    for _ in range(2):
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        with pytest.raises(EngineDirty, match="kv_cache"):
            scene.generate()
        scene.llm.wake_up(tags=["kv_cache"])
        assert scene.generate() == scene.reference
        scene.refit(1)
        assert scene.generate() != scene.reference
        scene.llm.sleep(level)
        scene.llm.wake_up(tags=["weights"])
    scene.refit(0)
    scene.llm.wake_up(tags=["kv_cache"])


@pytest.mark.parametrize("scene", ["sleep"], indirect=True)
def test_an_engine_that_sleeps_is_refused_before_an_epoch_begins(scene: Scene) -> None:
    from rlrefit.integration.errors import RefitError

    scene.llm.sleep(1)
    with pytest.raises(RefitError, match="asleep"):
        scene.meet()
    scene.llm.wake_up()
    scene.meet()
    scene.refit(0)
    assert scene.generate() == scene.reference
