"""Ranks of an ipc transport that meet over a file, without a session around them."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from rlrefit.recipes.bench.sleeping import SleepingMemory
from tests.refit.synthetic import Layout, SyntheticDestination, SyntheticSource, held_by, whole

HIDDEN, INTERMEDIATE, EXPERTS = 256, 384, 4


@dataclass(frozen=True)
class Scenario:
    """What every rank does.

    The ``action`` is one of ``refits``; ``move`` (the engines' storage moves before the last refit); ``remap`` (it is given
    back to the driver before the last refit, and comes anew, at the same addresses if they are free); ``sleep`` (so it is
    after every refit, and the engines say so); ``leave`` (so is the trainers', who say nothing); ``kill`` (the victim dies instead of the second refit); ``late`` (the
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
    pulls: bool = False  # engines read, whether their memory can be mapped or not
    # Of the engines' weights: torch's, private (no other process can map it) or that of torch_memory_saver.
    memory: str = "torch"

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
        if self.scenario.memory == "saver":
            from torch_memory_saver import torch_memory_saver

            with torch_memory_saver.region(tag="weights"):
                return SyntheticDestination(self.specs, layout, str(self.device))
        made = SyntheticDestination(self.specs, layout, str(self.device))
        if self.scenario.memory == "private":
            self.private = _in_private_memory(made, self.device)
        return made

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
        sleeps: bool | None = scenario.action == "sleep" and not self.is_source
        if scenario.action == "leave" and self.is_source:
            sleeps = None
        return IpcTransport(
            self.rank, plan, scenario.verify, self.device, scenario.timeout_s, lambda stage: None,
            lambda rank: f"refit rank {rank}", sleeps=sleeps,
            pulls="the test says so" if scenario.pulls and not self.is_source else "",
        )  # fmt: skip

    def fragments(self) -> list[Fragment]:
        found, _ = self.endpoint.fragments() if self.is_source else self.endpoint.fragments(self.specs)
        return found

    def bind(self) -> None:
        described = self._describe()
        while self.transport.asks_again(described):
            described = self._describe()
        self.transport.connect(described)
        self.meeting.vote()

    def _describe(self) -> list[Any]:
        self.transport.bind(self.fragments())
        return self.meeting.vote(self.transport.describe())

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


def _in_private_memory(endpoint: SyntheticDestination, device: torch.device) -> SleepingMemory:
    """Put an engine's weights where no other process can map them."""
    held = endpoint._wanted
    sizes = [storage.untyped_storage().nbytes() for storage in held.values()]
    memory = SleepingMemory(sizes, device, shareable=False)
    for index, (key, storage) in enumerate(held.items()):
        raw = memory.tensor(index, (sizes[index],), torch.uint8).view(storage.dtype)
        held[key] = raw.as_strided(storage.shape, storage.stride())
    endpoint.poison()
    return memory


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


def _saver(wanted: bool) -> AbstractContextManager[None]:
    """The environment of a process that uses torch_memory_saver, for as long as it is started."""
    if not wanted:
        return nullcontext()
    from torch_memory_saver import configure_subprocess

    found: AbstractContextManager[None] = configure_subprocess()
    return found


def run(scenario: Scenario, limit_s: float = 120.0) -> list[Any]:
    """What each rank returned, its error's text, or None for one that was killed."""
    spawn = get_context("spawn")
    results = spawn.Queue()
    ranks = [spawn.Process(target=_main, args=(scenario, r, results)) for r in range(scenario.size)]
    for rank, process in enumerate(ranks):
        with _saver(scenario.memory == "saver" and rank >= scenario.sources):
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
    """Give a rank's memory back to the driver and take it again; its bytes, and how many the GPU had more meanwhile."""
    storages = [held.untyped_storage() for held in held_by(rank.endpoint).values()]
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


def _leave(rank: Rank) -> dict[str, Any]:
    """Trainers leave and come back, and engines sleep, between any two refits; then nobody has the trainers' memory mapped."""
    rank.open()
    rows, gone, moved = [], [], []
    for version in (1, 2, 3):
        rank.transport.release()
        moved.append(rank.transport.moved())
        rank.meeting.vote()
        # One rank after another, since they may share a GPU.
        for turn in range(rank.scenario.size):
            if turn == rank.rank:
                gone.append(_asleep(rank) if rank.is_source else _engine_asleep(rank))
            rank.meeting.vote()
        rank.bind()
        rows.append(rank.refit(version))
    name = rank.transport.name
    rank.transport.close()
    return {"refits": rows, "gone": gone, "moved": moved, "name": name}


def _engine_asleep(rank: Rank) -> tuple[int, int]:
    """As :func:`_asleep`, of memory that wakes at the same addresses."""
    held = sum(storage.untyped_storage().nbytes() for storage in rank.endpoint._wanted.values())
    if rank.scenario.memory == "torch":
        return held, held
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info(rank.device)
    if rank.scenario.memory == "saver":
        from torch_memory_saver import torch_memory_saver

        sleep, wake = (partial(do, "weights") for do in (torch_memory_saver.pause, torch_memory_saver.resume))
    else:
        sleep, wake = rank.private.sleep, rank.private.wake
    sleep()
    given = torch.cuda.mem_get_info(rank.device)[0] - free
    wake()
    return held, given


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
    "leave": _leave,
    "remap": _remap,
    "kill": _kill,
    "busy": _busy,
    "lie": _lie,
    "epochs": _refits,
}
