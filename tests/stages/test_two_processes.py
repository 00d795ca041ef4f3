"""A trainer and an engine in two processes, with real memory and real refits, over the cycle's stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import MemoryWatch, ProcessMemory, StageRecord
from rlrefit.integration.colocated.stages import Stage, StageFailed
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, PeerLost
from rlrefit.integration.records.record import RefitRecord, summarize
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.common.called import CalledEngine
from tests.refit.synthetic import SyntheticSource
from tests.spawn import processes

from .engine_process import (
    CONFIG,
    CPU,
    ENGINE,
    KV_BYTES,
    SPECS,
    WEIGHTS_BYTES,
    WHOLE,
    Mapped,
    answer,
    caller,
    engine_main,
    mapped,
)

# What else a process takes and gives back meanwhile.
SLACK = 6 << 20


class Trainer:
    """Keeps its weights in a file while the engine generates."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._watch = MemoryWatch(CPU)
        self.source = SyntheticSource(SPECS, WHOLE)
        self._weights = mapped(self.source._held)
        self._optimizer = Mapped(torch.ones(2 * WEIGHTS_BYTES, dtype=torch.uint8))
        self.offload()
        self.free()

    def onload(self) -> None:
        for memory, values in zip(self._weights, torch.load(self._file), strict=True):
            memory.tensor.copy_(values)
        self._optimizer.tensor.fill_(1)

    def offload(self) -> None:
        self._optimizer.release()

    def free(self) -> None:
        torch.save([memory.tensor for memory in self._weights], self._file)
        for memory in self._weights:
            memory.release()

    def empty_cache(self) -> None:
        pass  # there is none on a CPU

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        found = self._watch.read("trainer rank 0")
        if restart:
            self._watch.restart()
        return [found]


class Pair:
    def __init__(self, folder: Path) -> None:
        self.pipe, theirs = processes().Pipe()
        self.process = processes().Process(target=engine_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.call = caller(self.pipe)
        self.engine, self.trainer = CalledEngine(self.call), Trainer(folder / "weights.pt")
        self.session: RefitSession | None = None
        self.server = open_rendezvous("127.0.0.1", 1, 1)

    def meet(self) -> None:
        """An epoch of both, who have their weights."""
        self.pipe.send(("join", (self.server.rendezvous.to_json(),)))
        self.session = RefitSession.open(
            self.server.rendezvous, 0, lambda: self.trainer.source, CONFIG, engine=ENGINE
        )
        answer(self.pipe)

    def refit(self, version: int) -> list[RefitRecord]:
        if self.session is None:
            self.meet()
        assert self.session is not None
        self.pipe.send(("refit", (version,)))
        try:
            sent = self.session.refit(version)
        except ValueError:
            with pytest.raises(PeerLost):
                answer(self.pipe)
            raise
        return [sent, RefitRecord(**answer(self.pipe))]

    def close(self) -> None:
        self.trainer._watch.close()
        self.process.kill()
        self.process.join()
        self.pipe.close()
        if self.session is not None:
            self.session.close()
        self.server.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    found.close()


def by_move(records: list[StageRecord], process: str) -> dict[str, ProcessMemory]:
    return {record.move: next(p for p in record.processes if p.process == process) for record in records}


def test_three_changed_versions_are_generated_from_and_memory_is_where_the_stage_says(pair: Pair) -> None:
    records: list[StageRecord] = []
    cycle = ColocatedCycle(pair.engine, pair.trainer, pair.refit, on_stage=records.append)
    cycle.sleep()
    with pytest.raises(EngineDirty, match="a part is asleep"):
        pair.call("generate")
    for version in range(3):
        records.clear()
        cycle.to_training()
        cycle.train(lambda version=version: pair.trainer.source.set_version(version))  # type: ignore[misc]
        found = cycle.to_generation(version)
        assert summarize(found).version == version
        assert all(record.bytes_bulk and record.stage_peaks["refit"] > 0 for record in found)
        assert cycle.generate(lambda: pair.call("generate")) == [(version, [])]
        engine = by_move(records, "engine rank 0")
        sleeping, waking = engine["load_trainer"].reserved, engine["wake_weights"]
        assert waking.reserved - sleeping == pytest.approx(WEIGHTS_BYTES, abs=SLACK)
        assert waking.peak_reserved >= waking.reserved
        # The first refit loads its libraries and takes its buckets.
        awake = engine["wake_kv_cache"].reserved
        assert version == 0 or awake - sleeping == pytest.approx(WEIGHTS_BYTES + KV_BYTES, abs=SLACK)
        trainer = {move: found.reserved for move, found in by_move(records, "trainer rank 0").items()}
        assert trainer["train"] - trainer["offload_trainer"] >= 2 * WEIGHTS_BYTES - SLACK
        assert trainer["refit"] - trainer["free_trainer"] >= WEIGHTS_BYTES - SLACK


def test_an_engine_that_is_killed_as_it_wakes_leaves_the_stage_lost_and_says_so(pair: Pair) -> None:
    records: list[StageRecord] = []
    cycle = ColocatedCycle(pair.engine, pair.trainer, pair.refit, on_stage=records.append)
    cycle.to_training()
    cycle.train(lambda: pair.trainer.source.set_version(0))
    cycle.offload_trainer()
    wake = pair.engine.wake

    def killed(tags: Any) -> None:
        pair.process.kill()
        pair.process.join()
        wake(tags)

    pair.engine.wake = killed  # type: ignore[method-assign]
    with pytest.raises(
        StageFailed,
        match=r"wake_weights failed: (EOFError|BrokenPipeError|ConnectionResetError).*Start the engine anew",
    ):
        cycle.wake_weights()
    assert cycle.state.stage is Stage.LOST
    assert [p.process for p in records[-1].processes] == ["trainer rank 0"]


def test_a_refit_that_fails_is_repeated_in_a_new_epoch(pair: Pair) -> None:
    cycle = ColocatedCycle(pair.engine, pair.trainer, pair.refit)
    cycle.to_training()
    cycle.train(lambda: pair.trainer.source.set_version(5))
    settle = pair.trainer.source.settle

    def broken() -> None:
        raise ValueError("a gather did not end")

    pair.trainer.source.settle = broken  # type: ignore[method-assign]
    with pytest.raises(
        StageFailed, match=r"refit failed: ValueError: a gather did not end.*Refit again, in a new epoch"
    ):
        cycle.to_generation(5)
    assert cycle.state.stage is Stage.WEIGHTS_AWAKE
    pair.trainer.source.settle = settle  # type: ignore[method-assign]
    pair.server.close()
    pair.server, pair.session = open_rendezvous("127.0.0.1", 1, 1, epoch=1), None
    cycle.to_generation(5)
    assert cycle.generate(lambda: pair.call("generate")) == [(5, [])]
