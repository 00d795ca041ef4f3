"""FP8 blocks, made by the trainer, in real SGLang 0.5.17 engines on GPUs: at TP1, and at TP2 beside a trainer that may share a GPU.

What an engine holds after refits is compared, byte for byte, with what SGLang loaded as it was started from a checkpoint of FP8 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlrefit.workers.engines.sglang.loader import LOADER
from tests.sglang.real_engine import Scene

from .needs import needs
from .sglang_trainer import CONFIG, SglangTrainer
from .test_sglang_on_gpu import Apart
from .vllm_checkpoints import write_checkpoint

pytestmark = [
    *needs("sglang", gpus=2),
    # SGLang compiles kernels for its first batch.
    pytest.mark.timeout(400),
]
WORKER_LOADER = "tests.gpu.sglang_worker.load"
LAYERS = 2
# Modules in FP8 blocks of each layer: attention's two, and the dense layer's two or all its experts.
CASES: dict[str, tuple[bool, int, int]] = {
    "dense, TP1": (False, 1, 4),
    "experts, TP1": (True, 1, 3),
    "dense, TP2": (False, 2, 4),
    "experts, TP2": (True, 2, 3),
}


class Quantizing(Apart):
    """An engine on the first GPUs, started from FP8 blocks, and on the last one a trainer that holds the weights in BF16."""

    def __init__(self, served: list[str], trained: list[str], ranks: int) -> None:
        self.trainer = SglangTrainer()
        self.ranks = ranks
        self.scene = Scene(
            served,
            "cuda",
            tp_size=ranks,
            disable_radix_cache=True,
            disable_custom_all_reduce=True,
            moe_runner_backend="triton",
            fp8_gemm_runner_backend="triton",
            custom_weight_loader=[LOADER, WORKER_LOADER],
        )
        self.scene.refit.calls.extend(WORKER_LOADER)
        self.trainer.do("hold", trained, True)
        self.version = -1

    def ask(self, command: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.scene.refit.calls.ask(command)
        return found

    def meet(self) -> int:
        config = replace(CONFIG, trainer_quantize_fp8=True)
        self.scene.refit.join_refit(self.begin_to_meet(), 1, config)
        return int(self.trainer.end())


@pytest.fixture(scope="module", params=CASES)
def quantizing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Quantizing, int]]:
    experts, ranks, modules = CASES[request.param]
    folder = tmp_path_factory.mktemp("quantizing")
    served, trained = (
        [write_checkpoint(folder / f"{fp8}_{i}", i, fp8=fp8, experts=experts) for i in (0, 1)]
        for fp8 in (True, False)
    )
    started = Quantizing(served, trained, ranks)
    yield started, modules * LAYERS
    started.close()


def test_two_refits_leave_the_codes_and_scales_that_sglang_loads_from_a_checkpoint(
    quantizing: tuple[Quantizing, int],
) -> None:
    apart, modules = quantizing
    scene = apart.scene
    assert apart.ask("blocks") == [{"modules": modules}] * apart.ranks
    loaded = []
    for index in (1, 0):
        scene._load(index)
        loaded.insert(0, apart.ask("digests"))
    scene.check("compare")  # with what it was started from
    assert apart.meet() == 0
    for index in (1, 0, 1, 0):
        apart.ask("poison")
        apart.refit(index)
        assert apart.ask("digests") == loaded[index]
        assert scene.generate() == scene.references[index]
        assert scene.refit.version == apart.version
    scene.check("compare")
    apart.leave()
