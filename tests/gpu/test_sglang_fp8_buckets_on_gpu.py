"""Codes and scales of the trainer in SGLang's flattened buckets, into real SGLang 0.5.17 engines on the trainer's own GPU.

What an engine holds after refits is compared, byte for byte, with what SGLang loaded from a checkpoint of FP8 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import EngineDirty, PlanError
from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.sglang.real_engine import Scene

from .needs import needs
from .test_sglang_fp8_on_gpu import WORKER_LOADER
from .vllm_checkpoints import write_checkpoint
from .vllm_trainer import CheckpointSource

pytestmark = [
    *needs("sglang"),
    # SGLang compiles kernels for its first batch.
    pytest.mark.timeout(400),
]
# Several buckets.
BUCKET_BYTES = 1 << 19


class Blocks:
    """An engine that was started from FP8 blocks, and beside it on the GPU a trainer that holds the weights in BF16."""

    def __init__(self, served: list[str], trained: list[str]) -> None:
        self.scene = Scene(
            served,
            "cuda",
            enable_memory_saver=True,
            moe_runner_backend="triton",
            fp8_gemm_runner_backend="triton",
            custom_weight_loader=[LOADER, WORKER_LOADER],
        )
        self.scene.refit.calls.extend(WORKER_LOADER)
        self.source = CheckpointSource(trained, torch.device("cuda", 0))
        self.loaded = []
        for index in (1, 0):
            self.scene._load(index)
            self.loaded.insert(0, self.ask("digests"))
        self.version = -1

    def ask(self, command: str, refit: SglangRefit | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (refit or self.scene.refit).calls.ask(command)
        return found

    def sender(self, refit: SglangRefit, *, quantize: bool = True) -> SglangSender:
        return SglangSender(self.source, refit, own_device(), BUCKET_BYTES, trainer_quantize_fp8=quantize)

    def refit(self, sender: SglangSender, index: int) -> None:
        self.version += 1
        self.source.take_on(index)
        sender.refit(self.version)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blocks]:
    folder = tmp_path_factory.mktemp("blocks")
    served, trained = (
        [write_checkpoint(folder / f"{fp8}_{i}", i, fp8=fp8, experts=request.param) for i in (0, 1)]
        for fp8 in (True, False)
    )
    started = Blocks(served, trained)
    yield started
    started.scene.engine.shutdown()


def test_refits_leave_the_codes_and_scales_that_sglang_loads_from_a_checkpoint(blocks: Blocks) -> None:
    scene, sender = blocks.scene, blocks.sender(blocks.scene.refit)
    for index in (1, 0, 1, 0):
        blocks.ask("poison")
        blocks.refit(sender, index)
        assert blocks.ask("digests") == blocks.loaded[index]
        assert scene.generate() == scene.references[index]
        assert scene.refit.version == blocks.version


def test_coroutines_refit_an_engine_that_sleeps_between(blocks: Blocks) -> None:
    scene = blocks.scene

    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(scene.engine)
        sender = blocks.sender(refit.blocking)
        for index in (1, 0):
            await refit.sleep()
            with pytest.raises(EngineDirty):
                await refit.require_servable()
            await refit.wake(["weights"])
            await refit.run(blocks.refit, sender, index)
            await refit.wake(["kv_cache"])
            assert await refit.run(blocks.ask, "digests", refit.blocking) == blocks.loaded[index]
            assert await scene.generate_async() == scene.references[index]

    scene.engine.loop.run_until_complete(scenario())


def test_weights_that_nobody_quantized_are_refused_and_the_engine_goes_on(blocks: Blocks) -> None:
    scene, before = blocks.scene, blocks.ask("digests")
    with pytest.raises(PlanError, match="keep the old scales"):
        blocks.refit(blocks.sender(scene.refit, quantize=False), 1)
    assert blocks.ask("digests") == before
    scene.refit.require_servable()
