"""Refits of real vLLM engines on GPUs: TP2, experts, CUDA graphs, sleep, FP8. The trainer is a process on the last GPU.

An engine of each configuration serves all of its tests, since starting it takes longest; what is being started is
printed as it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat

from .needs import needs
from .vllm_checkpoints import write_checkpoint
from .vllm_live import CUDA_GRAPHS, EAGER, PROMPTS, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Trainer

pytestmark = [
    *needs("vllm", "transformers", gpus=2),
    # An engine starts within a minute, and the first test that needs it has the rest.
    pytest.mark.timeout(150),
]

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
    "CUDA graphs": ({}, CUDA_GRAPHS, {}),
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


class Scene(LiveEngine):
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
        config = replace(CONFIG, trainer_quantize_fp8=trained)
        held = self.paths
        if trained:
            held = [
                write_checkpoint(folder / f"trained_{seed}", seed, **kind | {"fp8": False}) for seed in (0, 1)
            ]
        super().__init__(self.paths[0], trainer, config, arguments)
        if kind.get("scale") is ScaleFormat.UE8M0:
            # vLLM's loader gives blocks whose largest code is 224 half the scale and twice the codes: the same numbers.
            self._digests = "value_digests"
        trainer.commands.put(config)
        trainer.commands.put(held)
        self.reference, self.digests_a = self.generate(), self.digests()


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    checkpoint, arguments, environment = CASES[request.param]
    if torch.cuda.device_count() < arguments.get("tensor_parallel_size", 1) + 1:
        pytest.skip("needs a GPU for each rank of the engine and one for the trainer")
    with engine_environment(environment):
        tell(f"starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(
            tmp_path_factory.mktemp("engine"),
            trainer,
            checkpoint,
            arguments,
            trained=request.param in TRAINED,
        )
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
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
