"""Refits of real SGLang 0.5.17 engines on GPUs: on the trainer's own GPU by memory stage, and shard to shard.

An engine of each kind serves all of its tests, since starting it takes longest. Beside a trainer on a GPU of its own, the seconds
of a refit and of SGLang's own ``update_weights_from_distributed`` are printed as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty
from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.sglang.real_engine import Scene, updating
from tests.spawn import free_port

from .needs import needs
from .sglang_trainer import CONFIG, SglangTrainer
from .vllm_checkpoints import write_checkpoint
from .vllm_trainer import CheckpointSource

pytestmark = [
    *needs("sglang"),
    # SGLang compiles kernels for its first batch.
    pytest.mark.timeout(400),
]
_MIB = 1 << 20
# Of keys and values, in BF16: 2 layers of 4 heads of 64 numbers.
_TOKENS = 1 << 16
_KV_BYTES = _TOKENS * 2 * 2 * 4 * 64 * 2


class TakingTurns:
    """The trainer of the colocated scene: a checkpoint's weights, and memory that stands for gradients and optimizer."""

    def __init__(self, paths: list[str]) -> None:
        self.source = CheckpointSource(paths, torch.device("cuda", 0))
        self.index = 0
        self._training: torch.Tensor | None = None

    def onload(self) -> None:
        self._training = torch.ones(64 * _MIB, dtype=torch.uint8, device="cuda")

    def offload(self) -> None:
        self._training = None
        self.source.take_on(self.index)

    def free(self) -> None:
        """Its weights stay: the sender is made for one set of them."""

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self, *, restart: bool = False) -> list[Any]:
        return []


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def colocated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("colocated")
    paths = [write_checkpoint(folder / f"{i}", i, fp8=False, experts=request.param) for i in (0, 1)]
    scene = Scene(
        paths, "cuda", enable_memory_saver=True, max_total_tokens=_TOKENS, moe_runner_backend="triton"
    )
    yield scene
    scene.engine.shutdown()


def test_colocated_refits_give_the_engine_that_was_started_from_the_weights(colocated: Scene) -> None:
    trainer = TakingTurns(colocated.paths)
    sender = SglangSender(trainer.source, colocated.refit, own_device(), 4 * _MIB)
    for version, index in enumerate((1, 0, 1, 0)):
        colocated.poison()
        trainer.source.take_on(index)
        sender.refit(version)
        assert colocated.generate() == colocated.references[index]
        assert (colocated.refit.version, colocated.refit.weight_version()) == (version, str(version))
    colocated.check("compare")


@pytest.mark.parametrize("multi_stage", [True, False], ids=["in stages", "at once"])
def test_colocated_stages_give_memory_back_and_the_right_tokens(colocated: Scene, multi_stage: bool) -> None:
    records: list[StageRecord] = []
    cycle, trainer = _cycle(colocated, multi_stage, records.append)
    for version, index in enumerate((1, 0)):
        _turn(cycle, trainer, index, version)
        assert cycle.generate(colocated.generate) == colocated.references[index]
    colocated.check("compare")
    _require_memory(records)


def test_colocated_stages_from_coroutines(colocated: Scene) -> None:
    records: list[StageRecord] = []

    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(colocated.engine)
        trainer = TakingTurns(colocated.paths)
        sender = SglangSender(trainer.source, refit.blocking, own_device(), 4 * _MIB)
        cycle = await refit.run(
            lambda: ColocatedCycle(
                refit.blocking, trainer, lambda version: [sender.refit(version)], on_stage=records.append
            )
        )
        for version, index in enumerate((1, 0, 1, 0)):
            await refit.run(_turn, cycle, trainer, index, version)
            assert await colocated.generate_async() == colocated.references[index]
        await refit.sleep()
        with pytest.raises(EngineDirty):
            await refit.run(refit.blocking.require_servable)
        await refit.wake(["weights"])
        await refit.run(sender.refit, 9)
        await refit.wake(["kv_cache"])
        assert await colocated.generate_async() == colocated.references[0]

    colocated.engine.loop.run_until_complete(scenario())
    colocated.check("compare")
    _require_memory(records)


def _cycle(
    scene: Scene, multi_stage: bool, tell: Callable[[StageRecord], None]
) -> tuple[ColocatedCycle, TakingTurns]:
    trainer = TakingTurns(scene.paths)
    sender = SglangSender(trainer.source, scene.refit, own_device(), 4 * _MIB)
    cycle = ColocatedCycle(
        scene.refit,
        trainer,
        lambda version: [sender.refit(version)],
        multi_stage_wake_up=multi_stage,
        on_stage=tell,
    )
    return cycle, trainer


def _turn(cycle: ColocatedCycle, trainer: TakingTurns, index: int, version: int) -> None:
    cycle.to_training()
    trainer.index = index
    cycle.to_generation(version)


def _require_memory(records: list[StageRecord]) -> None:
    _tell(stages=[(r.move, round(r.seconds, 3), r.processes[0].device_used // _MIB) for r in records])
    # Of each move by itself: what processes of the GPU keep (kernels, caches of allocators) grows over the turns.
    used = [r.processes[0].device_used for r in records]
    changes: dict[str, list[int]] = {}
    for before, after, record in zip(used, used[1:], records[1:], strict=False):
        changes.setdefault(record.move, []).append(after - before)
    change = {move: statistics.median_low(found) for move, found in changes.items()}
    # The weights are small; the KV cache is not.
    assert change["sleep"] < -_KV_BYTES // 2
    assert change.get("wake_weights", 0) < _KV_BYTES // 2
    assert all(change[move] > _KV_BYTES // 2 for move in ("wake_kv_cache", "wake_all") if move in change)


def _tell(**found: Any) -> None:
    """A line of JSON; pytest shows it with -s."""
    sys.stdout.write(json.dumps(found) + "\n")


class Apart:
    """An engine on the first GPUs and a trainer on the last one."""

    def __init__(self, paths: list[str], *, experts: bool) -> None:
        self.trainer = SglangTrainer()
        self.ranks = 2 if torch.cuda.device_count() > 2 else 1
        self.scene = Scene(
            paths,
            "cuda",
            tp_size=self.ranks,
            ep_size=self.ranks if experts else 1,
            disable_radix_cache=True,
            disable_custom_all_reduce=True,
            moe_runner_backend="triton",
        )
        self.specs = self.trainer.do("hold", paths)
        self.server: Any = None
        self.version = -1

    def begin_to_meet(self) -> dict[str, Any]:
        """The rendezvous to which the trainer is on its way."""
        self.server = open_rendezvous("127.0.0.1", 1, self.ranks)
        self.trainer.begin("join", self.server.rendezvous)
        found: dict[str, Any] = self.server.rendezvous.to_json()
        return found

    def meet(self) -> int:
        self.scene.refit.join_refit(self.begin_to_meet(), 1, CONFIG)
        return int(self.trainer.end())

    def refit(self, index: int) -> float:
        self.version += 1
        self.trainer.do("take_on", index)
        self.trainer.begin("send", self.version)
        began = time.perf_counter()
        self.scene.refit.refit(self.version)
        seconds = time.perf_counter() - began
        self.trainer.end()
        return seconds

    def leave(self) -> None:
        self.trainer.begin("leave")
        self.scene.refit.close_refit()
        self.trainer.end()
        self.server.close()

    def close(self) -> None:
        self.trainer.close()
        self.scene.engine.shutdown()


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for the trainer beside the engine's")
    folder = tmp_path_factory.mktemp("apart")
    paths = [write_checkpoint(folder / f"{i}", i, fp8=False, experts=request.param) for i in (0, 1)]
    started = Apart(paths, experts=request.param)
    yield started
    started.close()


def test_shard_to_shard_refits_give_the_engine_that_was_started_from_the_weights(apart: Apart) -> None:
    scene = apart.scene
    assert apart.meet() == 0
    for index in (1, 0, 1, 0):
        scene.poison()
        apart.refit(index)
        assert scene.generate() == scene.references[index]
        assert scene.refit.version == apart.version
    scene.check("compare")
    apart.leave()


def test_coroutines_refit_shard_to_shard_while_requests_come(apart: Apart) -> None:
    scene = apart.scene

    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(scene.engine)
        await refit.join_refit(apart.begin_to_meet(), 1, CONFIG)
        apart.trainer.end()
        for mode, index in (("wait", 1), ("abort", 0), ("retract", 1)):
            apart.version += 1
            apart.trainer.do("take_on", index)
            apart.trainer.begin("send", apart.version)
            running = asyncio.ensure_future(scene.generate_async())
            await asyncio.sleep(0)
            await refit.refit(apart.version, mode)
            apart.trainer.end()
            await asyncio.gather(running, return_exceptions=True)  # SGLang may raise what it aborted
            assert await scene.generate_async() == scene.references[index]

    scene.engine.loop.run_until_complete(scenario())
    apart.leave()


def test_a_refit_beside_sglangs_own_broadcast(apart: Apart) -> None:
    """Seconds of both in one run; the broadcast's are of its plain form and of its buckets."""
    scene, names = apart.scene, [name for name, *_ in apart.specs]
    shapes, dtypes = [shape for _, shape, _ in apart.specs], [dtype for *_, dtype in apart.specs]
    port = free_port()
    apart.trainer.begin("join_broadcast", port, apart.ranks + 1)
    success, message = scene.engine.init_weights_update_group(
        "127.0.0.1", port, 1, apart.ranks + 1, "weight_update_group"
    )
    assert success, message
    apart.trainer.end()
    apart.meet()
    ours, theirs = [], []
    for index in (1, 0, 1, 0, 1, 0):
        scene.poison()
        ours.append(apart.refit(index))
        assert scene.generate() == scene.references[index]
        scene.poison()
        scene.settle()
        apart.trainer.begin("broadcast")
        began = time.perf_counter()
        with updating(scene.engine):
            success, message = scene.engine.update_weights_from_distributed(names, dtypes, shapes)
        theirs.append(time.perf_counter() - began)
        assert success, message
        apart.trainer.end()
        assert scene.generate() == scene.references[index]
    _tell(
        engine=f"SGLang TP{apart.ranks}",
        weights=len(names),
        refit_s=[round(s, 5) for s in ours],
        update_weights_from_distributed_s=[round(s, 5) for s in theirs],
    )
    apart.leave()
