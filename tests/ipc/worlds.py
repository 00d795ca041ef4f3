"""Ranks of an ipc transport that meet over a file, without a session around them."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.plan import analyse
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport import IpcTransport
from rlrefit.integration.weights.holdings import Holdings
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import Layout, SyntheticDestination, SyntheticSource, whole

HIDDEN, INTERMEDIATE, EXPERTS = 256, 384, 4


@dataclass(frozen=True)
class Scenario:
    """What every rank does.

    The ``action`` is one of ``refits``; ``move`` (the engines' storage moves before the last refit); ``remap`` (it is given
    back to the driver before the last refit, and comes anew, at the same addresses if they are free); ``sleep`` (so it is
    after every refit, and the engines say so); ``kill`` (the victim dies instead of the second refit); ``late`` (the
    trainers' storage moves before the third, which is void); ``busy`` (trainer rank 0 has its GPU busy beyond the timeout
    when it comes to write the second); ``lie`` (it tells another checksum in the second); and ``epochs``.
    """

    meeting: str  # a file that does not exist yet
    sources: int = 2  # trainer ranks, which hold whole experts
    destinations: int = 2  # engine ranks, which want a part of every expert
    action: str = "refits"
    times: int = 3  # refits or epochs
    victim: int = 0
    verify: str = "full"
    timeout_s: float = 60.0
    expandable: bool = False  # whether parameters lie in torch's expandable segments
    rows: int = 0  # of an additional large weight
    bucket_bytes: int = 1 << 20

    @property
    def size(self) -> int:
        return self.sources + self.destinations


class Meeting:
    """What a channel's votes do, over a file."""

    def __init__(self, scenario: Scenario, rank: int):
        self._store = FileStore(scenario.meeting, scenario.size)
        self._size, self._rank, self._count = scenario.size, rank, 0

    def vote(self, data: Any = None) -> list[Any]:
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", json.dumps(data))
        return [json.loads(self._store.get(f"{self._count}/{rank}")) for rank in range(self._size)]


class Rank:
    """One rank's endpoint, plan and transport."""

    def __init__(self, scenario: Scenario, rank: int, device: torch.device | None = None):
        self.scenario, self.rank = scenario, rank
        self.is_source = rank < scenario.sources
        self.device = device or torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        if scenario.expandable:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self.meeting = Meeting(scenario, rank)
        self.clock = StageClock(self.device)
        self.specs = _specs(scenario)
        self.endpoint: Any = self.make_endpoint()

    def make_endpoint(self) -> SyntheticSource | SyntheticDestination:
        layout = _layout(self.scenario, self.rank)
        if self.is_source:
            return SyntheticSource(self.specs, layout, device=str(self.device))
        return SyntheticDestination(self.specs, layout, str(self.device))

    def open(self) -> None:
        self.transport = self.make_transport()
        self.bind()

    def make_transport(self) -> IpcTransport:
        scenario = self.scenario
        positions = {spec.name: i for i, spec in enumerate(self.specs)}
        held = [
            Holdings.from_fragments(rank, _fragments(scenario, self.specs, rank), {}, positions)
            for rank in range(scenario.size)
        ]
        sides = held[: scenario.sources], held[scenario.sources :]
        plan = analyse(self.specs, *sides, bucket_bytes=scenario.bucket_bytes, fan_out=False).compile(
            self.rank
        )
        return IpcTransport(
            self.rank, plan, scenario.verify, self.device, scenario.timeout_s, lambda stage: None,
            lambda rank: f"refit rank {rank}", sleeps=scenario.action == "sleep" and not self.is_source,
        )  # fmt: skip

    def fragments(self) -> list[Fragment]:
        found, _ = self.endpoint.fragments() if self.is_source else self.endpoint.fragments(self.specs)
        return found

    def bind(self) -> None:
        self.transport.bind(self.fragments())
        self.transport.connect(self.meeting.vote(self.transport.describe()))
        self.meeting.vote()

    def prepare(self, version: int) -> None:
        """Change the weights of a trainer, poison those of an engine."""
        if self.is_source:
            self.endpoint.set_version(version)
        else:
            self.endpoint.poison()

    def refit(self, version: int) -> dict[str, Any]:
        """Change the weights, refit, and return what came of it."""
        self.prepare(version)
        self.transport.synchronize()
        self.meeting.vote()
        self.clock.restart()
        result = self.transport.run(self.clock)
        wrong = [] if self.is_source else self.endpoint.wrong(version)
        self.meeting.vote()
        told = {"payload": result.payload_bytes, "verified": result.verified_bytes, "void": result.void}
        return told | {"wrong": wrong}


def _specs(scenario: Scenario) -> list[TensorSpec]:
    specs = [
        *(TensorSpec(f"experts.{e}.gate", (INTERMEDIATE, HIDDEN), torch.bfloat16) for e in range(EXPERTS)),
        *(TensorSpec(f"experts.{e}.down", (HIDDEN, INTERMEDIATE), torch.bfloat16) for e in range(EXPERTS)),
        TensorSpec("norm", (HIDDEN,), torch.float32),
        TensorSpec("odd", (7, 5), torch.bfloat16),
        TensorSpec("scale", (), torch.float32),
    ]
    if scenario.rows:
        specs.append(TensorSpec("embedding", (scenario.rows, HIDDEN), torch.bfloat16))
    return specs


def _layout(scenario: Scenario, rank: int) -> Layout:
    specs = _specs(scenario)
    if rank < scenario.sources:
        own = (
            spec
            for spec in specs
            if not spec.name.startswith("experts") or _expert(spec) % scenario.sources == rank
        )
        return whole(own)
    part = INTERMEDIATE // scenario.destinations
    index = rank - scenario.sources
    cut = (index * part, (index + 1) * part)
    layout = whole(specs)
    for expert in range(EXPERTS):
        layout[f"experts.{expert}.gate"] = [(cut, (0, HIDDEN))]
        layout[f"experts.{expert}.down"] = [((0, HIDDEN), cut)]
    return layout


def _expert(spec: TensorSpec) -> int:
    return int(spec.name.split(".")[1])


def _fragments(scenario: Scenario, specs: list[TensorSpec], rank: int) -> Any:
    return SyntheticSource(specs, _layout(scenario, rank), device="meta").fragments()[0]


def _main(scenario: Scenario, rank: int, results: Any) -> None:
    try:
        results.put((rank, _ACTIONS[scenario.action](Rank(scenario, rank))))
    except RefitError as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    # The other ranks may still wait for this one in the file; they are ended by the test.


def run(scenario: Scenario, limit_s: float = 120.0) -> list[Any]:
    """What each rank returned, its error's text, or None for one that was killed."""
    spawn = get_context("spawn")
    results = spawn.Queue()
    ranks = [spawn.Process(target=_main, args=(scenario, r, results)) for r in range(scenario.size)]
    for process in ranks:
        process.start()
    ended: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(ended) < scenario.size and time.monotonic() < deadline:
            try:
                rank, result = results.get(timeout=0.2)
                ended[rank] = result
            except queue.Empty:
                for rank, process in enumerate(ranks):
                    if process.exitcode == -signal.SIGKILL:
                        ended.setdefault(rank, None)
                    elif process.exitcode:
                        raise AssertionError(f"rank {rank} died, exit code {process.exitcode}") from None
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert set(ended) == set(range(scenario.size)), f"only ranks {sorted(ended)} ended in time"
    return [ended[rank] for rank in range(scenario.size)]


def _ended(rank: Rank) -> str:
    """How the ``transport``'s refit ends."""
    try:
        rank.transport.run(rank.clock)
    except RefitError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _refits(rank: Rank) -> dict[str, Any]:
    rows, resources = [], []
    for version in range(1, rank.scenario.times + 1):
        if version == 1 or rank.scenario.action == "epochs":
            rank.open()
        rows.append(rank.refit(version))
        if rank.scenario.action == "epochs":
            rank.transport.close()
        resources.append(_resources(rank))
    rank.transport.close()
    return {"refits": rows, "resources": resources}


def _move(rank: Rank) -> dict[str, Any]:
    rank.open()
    rows = [rank.refit(1), rank.refit(2)]
    if not rank.is_source:
        old, rank.endpoint = rank.endpoint, rank.make_endpoint()
    rank.bind()
    rows.append(rank.refit(3))
    if not rank.is_source:
        # The old storage still lies where it was: nothing may have been written to it.
        rows[-1]["wrong"] += [f"moved {name}" for name in old.wrong(2)]
    rank.transport.close()
    return {"refits": rows}


def _late(rank: Rank) -> dict[str, Any]:
    """A trainer's weights move before the third refit, and it looks for them while it writes."""
    rank.open()
    rows = [rank.refit(1), rank.refit(2)]
    if rank.is_source:
        # The old memory stays with torch's allocator.
        rank.endpoint = rank.make_endpoint()
    checks = rank.transport.check_during_run(lambda: True)
    void = rank.refit(3)["void"]
    rank.bind()
    rows.append(rank.refit(3))
    checks_again = rank.transport.check_during_run(lambda: False)
    rows.append(rank.refit(4))
    # A segment of its own, which goes back to the driver.
    torch.empty(256 << 20, dtype=torch.uint8, device=rank.device)
    torch.cuda.empty_cache()
    blind = rank.transport.check_during_run(lambda: False)
    rank.transport.close()
    return {"refits": rows, "void": void, "checks": [checks, checks_again, blind]}


def _asleep(rank: Rank) -> tuple[int, int]:
    """Give an engine's memory back to the driver and take it again; its bytes, and how many the GPU had more meanwhile."""
    storages = [held.untyped_storage() for held in rank.endpoint._wanted.values()]
    sizes = [storage.nbytes() for storage in storages]
    free, _ = torch.cuda.mem_get_info(rank.device)
    for storage in storages:
        storage.resize_(0)
    torch.cuda.empty_cache()
    given = torch.cuda.mem_get_info(rank.device)[0] - free
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    return sum(sizes), given


def _sleep(rank: Rank) -> dict[str, Any]:
    rank.open()
    rows, slept, moved = [], [], []
    for version in (1, 2, 3):
        # Before the first refit, too: an engine may sleep as soon as the ranks have met.
        rank.transport.release()
        moved.append(rank.transport.moved())
        rank.meeting.vote()
        # One engine after another, since they may share a GPU.
        for turn in range(rank.scenario.size):
            if turn == rank.rank and not rank.is_source:
                slept.append(_asleep(rank))
            rank.meeting.vote()
        rank.bind()
        rows.append(rank.refit(version))
    rank.transport.close()
    return {"refits": rows, "slept": slept, "moved": moved}


def _remap(rank: Rank) -> dict[str, Any]:
    rank.open()
    rows = [rank.refit(1), rank.refit(2)]
    still = any(rank.meeting.vote(rank.transport.moved()))
    if not rank.is_source:
        _asleep(rank)
    moved = rank.transport.moved()
    rank.meeting.vote()
    rank.bind()
    rows.append(rank.refit(3))
    moved_again = rank.transport.moved()
    rank.transport.close()
    return {"refits": rows, "moved": [still, moved, moved_again]}


def _kill(rank: Rank) -> dict[str, Any]:
    rank.open()
    rank.refit(1)
    rank.transport.synchronize()
    rank.meeting.vote()
    if rank.rank == rank.scenario.victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.is_source:
        # The driver shall have cleaned up after the victim when this rank writes.
        rank.endpoint.set_version(2)
        time.sleep(1)
    start = time.monotonic()
    ended = _ended(rank)
    seconds = time.monotonic() - start
    if ended == "done" and not rank.is_source and (wrong := rank.endpoint.wrong(2)):
        ended = f"wrong: {wrong}"
    rank.transport.close(failed=True)
    return {"ended": ended, "seconds": seconds}


def _busy(rank: Rank) -> dict[str, Any]:
    rank.open()
    rank.refit(1)
    rank.prepare(2)
    rank.transport.synchronize()
    rank.meeting.vote()
    if rank.rank == 0:
        # Some 3e9 cycles are 1.5 s and more, on any GPU.
        for _ in range(int(rank.scenario.timeout_s) + 2):
            torch.cuda._sleep(3_000_000_000)
    ended = _ended(rank)
    torch.cuda.synchronize()
    rank.meeting.vote()
    # What trainer rank 0 holds must not have come, however late.
    late = [] if rank.is_source else rank.endpoint.wrong(2)
    rank.transport.close(failed=True)
    return {"ended": ended, "missing": late}


def _lie(rank: Rank) -> dict[str, Any]:
    rank.open()
    rank.refit(1)
    if rank.rank == 0:
        compute = rank.transport._sent_checksums.compute

        def wrongly(refit: int) -> int:
            covered = compute(refit)
            rank.transport._sent_checksums.sums[0] += 1
            return covered

        rank.transport._sent_checksums.compute = wrongly  # type: ignore[method-assign]
    rank.transport.synchronize()
    rank.meeting.vote()
    ended = _ended(rank)
    rank.meeting.vote()
    rank.transport.close(failed=True)
    return {"ended": ended}


def _resources(rank: Rank) -> tuple[int, int]:
    """Open descriptors of this process, and used memory of its device; all ranks are at rest meanwhile."""
    rank.meeting.vote()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(rank.device)
    found = (len(list(Path("/proc/self/fd").iterdir())), total - free)
    rank.meeting.vote()
    return found


_ACTIONS = {
    "refits": _refits,
    "move": _move,
    "late": _late,
    "sleep": _sleep,
    "remap": _remap,
    "kill": _kill,
    "busy": _busy,
    "lie": _lie,
    "epochs": _refits,
}
