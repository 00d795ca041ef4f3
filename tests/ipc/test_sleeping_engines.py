"""Trainers refit engines that sleep, move, change and fail in random orders, and leave their memory themselves; the driver is
played, all above it is real.

Some engines lie in memory that no other process can map, and read their trainers'. After every refit each byte is where it belongs; the memory of engines that sleep is nobody else's when they fall asleep; and nothing is
mapped, reserved or open once an epoch has ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from rlrefit.integration.errors import TransportUnavailable
from rlrefit.integration.gpu_memory.description import Description
from rlrefit.integration.layout import Box, Fragment
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport.ipc import IpcTransport
from rlrefit.integration.transport.storage import LiveViews
from tests.ipc.played_driver import CHUNK, Bytes, PlayedDriver, played
from tests.ipc.test_memory import open_descriptors

ITEM = 2  # BF16
ADDRESSES = 64 * CHUNK
TIMEOUT = 5.0
SEEDS = range(8)
REFITS = 40
# What may fail while memory is looked up, handed over and mapped.
FAILING = (
    "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuMemAddressReserve", "cuMemExportToShareableHandle", "cuMemGetAddressRange",
    "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess",
)  # fmt: skip


@dataclass
class Owner:
    """A rank's weights: tensors over memory of the played driver that it maps itself."""

    driver: PlayedDriver
    rank: int
    dice: random.Random
    shapes: Mapping[str, tuple[int, int]]
    boxes: Mapping[str, Box]
    classic: bool = False
    sleep_mode: bool = False
    shareable: bool = True

    def __post_init__(self) -> None:
        self.space = self.driver.spaces[self.rank]
        self.base = self.space.reserve(ADDRESSES)
        self._choose_places()
        self._choose_chunks()
        self.makes_its_tensors_anew()
        self.wake()

    def sleep(self) -> None:
        """Give the memory back, with all that it held."""
        at = self.base
        for size in self.chunks:
            held = self.space.mapped.pop(at)
            self.driver.drop(held)
            assert not (self.sleep_mode and held.references), (
                f"rank {self.rank} gave back {at:#x}, and others hold it"
            )
            at += size

    def wake(self) -> None:
        """Other memory, at the same addresses."""
        at = self.base
        for size in self.chunks:
            self.space.mapped[at] = self.driver.make(size, classic=self.classic, shareable=self.shareable)
            at += size

    def stays(self) -> None:
        """Nothing happens."""

    def sleeps(self) -> None:
        self.sleep()
        self.wake()

    def wakes_in_other_chunks(self) -> None:
        self.sleep()
        self._choose_chunks()
        self.wake()

    def wakes_elsewhere(self) -> None:
        self.sleep()
        before, self.base = self.base, self.space.reserve(ADDRESSES)
        del self.space.reserved[before]
        self.makes_its_tensors_anew()
        self.wake()

    def wakes_with_other_places(self) -> None:
        """As after loading anew: weights lie elsewhere in the same memory."""
        self.sleep()
        self._choose_places()
        if self._needed > sum(self.chunks):
            self._choose_chunks()
        self.makes_its_tensors_anew()
        self.wake()

    def is_offloaded_and_loaded_anew(self) -> None:
        self.sleeps()
        self.makes_its_tensors_anew()

    def fill(self, bytes_of: np.random.Generator) -> None:
        """New weights."""
        for f in self.fragments:
            if f.view.numel():
                raw = bytes_of.integers(0, 256, (f.view.shape[0], f.view.shape[1] * ITEM), dtype=np.uint8)
                self.driver.store(f.view.data_ptr(), raw, (f.view.stride(0) * ITEM, 1))

    def holds(self, name: str, box: Box) -> Bytes:
        held = next(f for f in self.fragments if f.name == name)
        rows = held.view[box[0][0] - held.box[0][0] : box[0][1] - held.box[0][0]]
        with self.driver.on(self.rank):
            shape = (rows.shape[0], rows.shape[1] * ITEM)
            return self.driver.load(rows.data_ptr(), shape, (rows.stride(0) * ITEM, 1))

    def _choose_places(self) -> None:
        """In which order, how far apart, and with how much between its rows each weight lies."""
        self._places, at = dict[str, tuple[int, int]](), self.dice.choice([0, 16, 64])
        for name in self.dice.sample(sorted(self.boxes), len(self.boxes)):
            (start, stop), (_, columns) = self.boxes[name]
            step = columns * ITEM + self.dice.choice([0, 0, 2, 16])
            self._places[name] = at, step
            at += (stop - start) * step + self.dice.choice([0, 14])
        self._needed = at

    def _choose_chunks(self) -> None:
        left = -(-self._needed // CHUNK) + 1
        self.chunks = [left * CHUNK] if self.classic else []
        while not self.classic and left > 0:
            some = min(left, self.dice.choice([1, 1, 2]))
            self.chunks.append(some * CHUNK)
            left -= some

    def makes_its_tensors_anew(self) -> None:
        """Where they are, in storages of their own."""
        whole = torch.frombuffer((ctypes.c_uint8 * ADDRESSES).from_address(self.base), dtype=torch.bfloat16)
        found = []
        for name, box in self.boxes.items():
            at, step = self._places[name]
            shape = [stop - start for start, stop in box]
            view = whole.as_strided(shape, (step // ITEM, 1), at // ITEM)
            found.append(Fragment(name, self.shapes[name], box, view))
        # Only now the former ones go: a new storage must not look like the one before.
        self.fragments = found


TRAINER_STEPS = (
    *[Owner.stays] * 6, Owner.wakes_elsewhere, Owner.makes_its_tensors_anew, Owner.sleeps,
    Owner.is_offloaded_and_loaded_anew,
)  # fmt: skip
ENGINE_STEPS = (
    Owner.stays, *[Owner.sleeps] * 5, Owner.wakes_in_other_chunks, Owner.wakes_elsewhere,
    Owner.wakes_with_other_places,
)  # fmt: skip


class Tallied(IpcTransport):
    """Counts how often a sender could keep its tables."""

    tally: Counter[str]

    def _map_again(self, peers: Mapping[int, Description]) -> bool:
        followed = super()._map_again(peers)
        if self._sends and self._refits:
            self.tally["followed" if followed else "bound in full"] += 1
        if self._pulls and self._refits:
            self.tally["followed to read" if followed else "bound in full to read"] += 1
        return followed


class World:
    """Trainers and engines, and the epochs in which they refit."""

    def __init__(self, driver: PlayedDriver, seed: int, trainers: int, engines: int):
        self.tally: Counter[str] = Counter()
        self._driver = driver
        self._dice = dice = random.Random(seed)
        self._bytes = np.random.default_rng(seed)
        self._verify = dice.choice(["off", "sampled", "full"])
        self._history: list[str] = []
        shapes = {f"w{i}": (dice.choice([3, 8, 20, 50]), dice.choice([1, 4, 24, 33])) for i in range(5)}
        parts = _row_shards(shapes, trainers, dice)
        whole = {name: tuple((0, n) for n in shape) for name, shape in shapes.items()}
        self._trainers = [
            Owner(driver, rank, dice, shapes, parts[rank], dice.random() < 0.25, dice.random() < 0.75)
            for rank in range(trainers)
        ]
        # The first one sleeps, in chunks: one whose tables can be kept is there in any case.
        self._engines = []
        for place in range(engines):
            classic, sleep_mode = place > 0 and dice.random() < 0.25, not place or dice.random() < 0.75
            shareable = classic or dice.random() < 0.5
            self._engines.append(
                Owner(driver, trainers + place, dice, shapes, whole, classic, sleep_mode, shareable)
            )
        self._owners = [*self._trainers, *self._engines]
        self._messages = self._plan(parts)
        driver.chunked_signals = {owner.rank for owner in self._owners if dice.random() < 0.5}
        gc.collect()  # what other tests left must not be closed in between
        self._descriptors, self._threads = open_descriptors(), set(threading.enumerate())
        self._open_epoch()

    def refit(self) -> None:
        """Let all take a step, bind anew where something moved, and refit; a new epoch begins where that fails."""
        for owner in self._owners:
            self._take_a_step(owner)
        if self._is_stale():
            if self._dice.random() < 0.25:
                function, nth = self._dice.choice(FAILING), self._dice.randint(1, 12)
                self._driver.fail(function, nth)
                self._history.append(f"call {nth} of {function} fails")
            try:
                self._bind_again()
            except TransportUnavailable:
                self.tally["binding given up"] += 1
                self._begin_anew()
                return
        self._driver.fail_no_more()
        if self._dice.random() < 0.05:
            self._fail_in_the_middle()
            return
        clock = StageClock(torch.device("cpu"))
        self._each(lambda transport: transport.run(clock))
        self.tally["refits"] += 1
        self._require_exact()

    def end(self) -> None:
        self._close(failed=False)
        for owner in self._owners:
            owner.sleep()
        assert not self._driver.alive, self._told()

    def _plan(self, parts: Sequence[Mapping[str, Box]]) -> list[Message]:
        """Two messages of each trainer to each engine."""
        found: list[Message] = []
        for trainer in self._trainers:
            held = sorted(n for n, ((start, stop), _) in parts[trainer.rank].items() if stop > start)
            for engine in self._engines:
                for names in (held[::2], held[1::2]):
                    segments, at = [], 0
                    for name in names:
                        (start, stop), (_, columns) = box = parts[trainer.rank][name]
                        nbytes = (stop - start) * columns * ITEM
                        segments.append(Segment(name, box, at, nbytes))
                        at += -(-nbytes // 16) * 16
                    if segments:
                        ends = trainer.rank, engine.rank
                        found.append(Message(*ends, len(found), tuple(segments), at + 16, trainer.rank))
        return found

    def _open_epoch(self) -> None:
        self._transports = []
        turn = self._dice.getrandbits(63)
        for owner in self._owners:
            sent = tuple(m for m in self._messages if m.source == owner.rank)
            received = tuple(m for m in self._messages if m.destination == owner.rank)
            transport = Tallied(
                owner.rank, Plan(owner.rank, (sent,), (received,), "", {}), self._verify,
                torch.device("cuda", owner.rank), TIMEOUT, lambda stage: None, str, turn=turn,
                # A trainer that says nothing shares its GPU.
                sleeps=None if owner in self._trainers and owner.sleep_mode else owner.sleep_mode,
            )  # fmt: skip
            transport.tally = self.tally
            self._transports.append(transport)
        self._keys = self._places()
        self._bind()
        self._each(IpcTransport.release)

    def _each(self, do: Callable[[IpcTransport], object]) -> None:
        for transport in self._transports:
            with self._driver.on(transport.rank):
                do(transport)

    def _take_a_step(self, owner: Owner) -> None:
        trains = owner in self._trainers
        # An engine without a sleep mode seldom frees its memory: peers that have it mapped keep it.
        steps = TRAINER_STEPS if trains else ENGINE_STEPS
        idle = not (trains or owner.sleep_mode or self._dice.random() < 0.3)
        step = Owner.stays if idle else self._dice.choice(steps)
        self._history.append(f"{owner.rank} {step.__name__}")
        with self._driver.on(owner.rank):
            step(owner)
            if trains:
                owner.fill(self._bytes)

    def _places(self) -> list[Hashable]:
        return [LiveViews(owner.fragments).places() for owner in self._owners]

    def _is_stale(self) -> bool:
        self._each(IpcTransport.synchronize)
        moved: list[bool] = []
        self._each(lambda transport: moved.append(transport.moved()))
        before, self._keys = self._keys, self._places()
        return any(moved) or self._keys != before

    def _bind(self) -> None:
        """As the bulk engine has it: all ranks do each step, and if any can't, none goes on."""
        told: list[object] = []
        again: list[bool] = []

        def bind(transport: IpcTransport) -> None:
            transport.bind(self._owners[transport.rank].fragments)
            told.append(json.loads(json.dumps(transport.describe())))

        self._vote(bind)
        self._each(lambda transport: again.append(transport.asks_again(told)))
        assert len(set(again)) == 1, "ranks would wait for each other"
        if again[0]:
            told.clear()
            self._vote(bind)
            self._each(lambda transport: again.append(transport.asks_again(told)))
            assert not again[-1]
        pulling = [engine.rank for engine in self._engines if not engine.shareable]
        assert all(transport.name == ("pull" if pulling else "ipc") for transport in self._transports)
        self._vote(lambda transport: transport.connect(told))

    def _vote(self, do: Callable[[IpcTransport], object]) -> None:
        unable: list[TransportUnavailable] = []

        def attempt(transport: IpcTransport) -> None:
            try:
                do(transport)
            except TransportUnavailable as error:
                unable.append(error)

        self._each(attempt)
        if unable:
            raise unable[0]

    def _bind_again(self) -> None:
        try:
            self._bind()
        except TransportUnavailable:
            self.tally["retried"] += 1
            if self._dice.random() < 0.3:
                self._driver.fail(self._dice.choice(FAILING), 1)
            self._bind()

    def _fail_in_the_middle(self) -> None:
        """A trainer has written when something else breaks off its refit."""
        with self._driver.on(0), pytest.raises(ZeroDivisionError):
            self._transports[0].run(StageClock(torch.device("cpu")), lambda: 1 // 0)
        self._history.append("the refit fails")
        self.tally["failed refits"] += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._driver.fail_no_more()
        self._close(failed=True)
        self._open_epoch()

    def _close(self, *, failed: bool) -> None:
        for _ in range(2):
            self._each(partial(IpcTransport.close, failed=failed))
        self._driver.drop_signals()
        for owner in self._owners:
            assert set(owner.space.reserved) == {owner.base}, f"addresses stay reserved: {self._told()}"
            assert len(owner.space.mapped) == len(owner.chunks), f"memory stays mapped: {self._told()}"
        assert {held.references for held in self._driver.alive.values()} == {1}, f"held: {self._told()}"
        assert len(self._driver.alive) == sum(len(owner.chunks) for owner in self._owners), self._told()
        assert open_descriptors() <= self._descriptors, f"descriptors stay open: {self._told()}"
        for thread in set(threading.enumerate()) - self._threads:
            if thread.name.startswith("rlrefit"):
                thread.join(TIMEOUT)
                assert not thread.is_alive(), f"{thread.name} still runs: {self._told()}"

    def _require_exact(self) -> None:
        for message in self._messages:
            for segment in message.segments:
                sent = self._owners[message.source].holds(segment.name, segment.box)
                there = self._owners[message.destination].holds(segment.name, segment.box)
                place = f"{segment.name} of rank {message.source} at rank {message.destination}"
                assert np.array_equal(sent, there), f"other bytes in {place}: {self._told()}"

    def _told(self) -> str:
        return f"after {self.tally['refits']} refits; the last steps: {', '.join(self._history[-30:])}"


def _row_shards(
    shapes: Mapping[str, tuple[int, int]], trainers: int, dice: random.Random
) -> list[dict[str, Box]]:
    """Each trainer's rows of each weight, of which it may have none."""
    found: list[dict[str, Box]] = [{} for _ in range(trainers)]
    for name, (rows, columns) in shapes.items():
        cuts = sorted([0, *(dice.randint(0, rows) for _ in range(trainers - 1)), rows])
        for held, part in zip(found, pairwise(cuts), strict=True):
            held[name] = part, (0, columns)
    return found


@cache
def outcome(seed: int) -> Counter[str]:
    """What happened in a world of up to three trainers and up to three engines."""
    trainers, engines = 1 + seed % 3, 1 + seed // 3 % 3
    with played(trainers + engines) as driver:
        world = World(driver, seed, trainers, engines)
        for _ in range(REFITS):
            world.refit()
        world.end()
    return world.tally


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_that_sleep_and_change_hold_what_was_sent_and_nothing_of_theirs_is_kept(seed: int) -> None:
    assert outcome(seed)["refits"]


def test_the_worlds_kept_tables_bound_in_full_bound_twice_gave_up_and_failed() -> None:
    tally = sum((outcome(seed) for seed in SEEDS), Counter[str]())
    least = {
        "followed": 50, "bound in full": 50, "followed to read": 30, "bound in full to read": 50,
        "retried": 10, "binding given up": 2, "failed refits": 2,
    }  # fmt: skip
    assert all(tally[what] >= times for what, times in least.items()), tally
