"""INT4, made by the trainer, in SGLang's flattened buckets, into real SGLang engines on the trainer's own GPU.

What an engine holds after refits is compared, byte for byte, with what engines hold that SGLang started from checkpoints in INT4, and so
are its greedy tokens. Marlin's experts add up by atomics there, in an order of the moment (SGLang's ``fused_marlin_moe.py``): half of
such an engine's tokens have to be the same, of which engines of other weights share less than a quarter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.recipes.rollout.arguments import int4
from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.sglang.real_engine import PROMPTS, SAMPLING, start

from .needs import needs
from .test_sglang_fp8_on_gpu import WORKER_LOADER
from .vllm_checkpoints import quantize_to_int4, write_checkpoint
from .vllm_trainer import CheckpointSource

pytestmark = [
    *needs("sglang"),
    # SGLang starts three engines, and compiles kernels for the first batch of each.
    pytest.mark.timeout(900),
]
# Several buckets.
BUCKET_BYTES = 1 << 19
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 2}
MARLIN, TRITON = {"moe_runner_backend": "marlin"}, {"moe_runner_backend": "triton"}
# Groups, whether there are experts, and settings of the engine.
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "groups of 32": (32, False, {}),
    "groups of 128, CUDA graphs": (128, False, GRAPHS),
    "experts": (32, True, MARLIN),
    "experts, CUDA graphs": (128, True, MARLIN | GRAPHS),
    "experts, Triton": (128, True, TRITON),
}
# Constants, with which nothing computes.
_IDLE = ("_shape", "_g_idx", "_sort_indices")


class Running:
    """An engine that sleeps between refits."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        loaders = [LOADER, WORKER_LOADER]
        self._engine = start(path, "cuda", enable_memory_saver=True, custom_weight_loader=loaders, **settings)
        self.refit = SglangRefit(EngineCaller(self._engine))
        self.refit.calls.extend(WORKER_LOADER)

    def poison(self) -> None:
        self.refit.calls.ask("poison")

    def digests(self) -> dict[str, str]:
        """Of all with which something computes."""
        [found] = self.refit.calls.ask("digests")
        return {name: digest for name, digest in found.items() if not name.endswith(_IDLE)}

    def generate(self) -> list[Any]:
        outputs = self._engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        return [output["output_ids"] for output in outputs]

    def close(self) -> None:
        self._engine.shutdown()


@contextmanager
def running(path: str, settings: dict[str, Any]) -> Iterator[Running]:
    engine = Running(path, settings)
    try:
        yield engine
    finally:
        engine.close()


def shared(tokens: list[list[int]], expected: list[list[int]]) -> float:
    """The share of tokens that are the expected ones where they are."""
    same = [
        a == b for one, other in zip(tokens, expected, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return sum(same) / len(same)


@pytest.mark.parametrize("case", CASES)
def test_refits_leave_the_engine_that_sglang_starts_from_a_checkpoint_in_int4(
    case: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    group, experts, settings = CASES[case]
    trained, served = (
        [write_checkpoint(tmp_path / f"{kind} {i}", i, fp8=False, experts=experts) for i in (0, 1)]
        for kind in ("trained", "served")
    )
    expected = []
    for path in served:
        quantize_to_int4(Path(path), int4(group))
        tell(f"starting SGLang from {path}")
        with running(path, settings) as engine:
            expected.append((engine.digests(), engine.generate()))
    assert shared(expected[0][1], expected[1][1]) < 0.25
    # As a recipe starts it, from a checkpoint in BF16.
    overrides = json.dumps({"quantization_config": int4(group)})
    source = CheckpointSource(trained, torch.device("cuda", 0))
    tell("starting SGLang as in a recipe")
    with running(
        trained[0], settings | {"json_model_override_args": overrides, "load_format": "dummy"}
    ) as engine:
        sender = SglangSender(source, engine.refit, own_device(), BUCKET_BYTES, trainer_quantize_int4=True)
        for version, index in enumerate((1, 0, 1, 0)):
            if version % 2:
                engine.refit.sleep()
                engine.refit.wake(["weights"])
            engine.poison()
            source.take_on(index)
            sender.refit(version)
            if version % 2:
                engine.refit.wake(["kv_cache"])
            digests, tokens = expected[index]
            assert engine.digests() == digests
            assert shared(engine.generate(), tokens) >= (0.5 if settings.items() >= MARLIN.items() else 1.0)
            assert engine.refit.version == version
