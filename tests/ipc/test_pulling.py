"""Receivers whose memory nobody can map read their senders'. The driver is played, all above it is real."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlrefit.integration.errors import RefitMismatch, RefitTimeout, TransportUnavailable, VerificationError
from rlrefit.integration.layout import Encoding, Fragment, box_of
from rlrefit.integration.packing import Cast
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.quantize.formats import Codes, Fp8Blockwise, Nvfp4, Scales, WholeBlocks
from rlrefit.integration.quantize.jobs import GlobalScale
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport.ipc import IpcTransport
from rlrefit.integration.weights.quantizing import encoded_fragments
from tests.ipc.played_driver import CHUNK, PlayedDriver, played

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, ...]


class Weights:
    """A rank's weights, one after another in memory of the played driver, each row a few bytes apart from the next."""

    def __init__(
        self,
        driver: PlayedDriver,
        rank: int,
        shapes: Mapping[str, tuple[Shape, torch.dtype]],
        encodings: Mapping[str, Encoding] | None = None,
        *,
        shareable: bool,
        classic: bool = False,
    ):
        self.driver, self.rank = driver, rank
        space, places, at = driver.spaces[rank], {}, 0
        for name, (shape, dtype) in shapes.items():
            places[name] = at
            at += shape[0] * (shape[1] * dtype.itemsize + 16)
        size = (at // CHUNK + 1) * CHUNK
        self.base = space.reserve(size)
        self.held = space.mapped[self.base] = driver.make(size, classic=classic, shareable=shareable)
        raw = (ctypes.c_uint8 * size).from_address(self.base)
        self.views = {}
        for name, (shape, dtype) in shapes.items():
            flat = torch.frombuffer(
                raw, dtype=dtype, offset=places[name], count=(size - places[name]) // dtype.itemsize
            )
            self.views[name] = flat.as_strided(shape, (shape[1] + 16 // dtype.itemsize, 1))
        self.encodings = encodings or {}

    @property
    def fragments(self) -> list[Fragment]:
        return [
            Fragment(name, tuple(view.shape), box_of(view.shape), view, self.encodings.get(name))
            for name, view in self.views.items()
        ]

    def write(self, name: str, values: torch.Tensor) -> None:
        view = self.views[name]
        item = view.element_size()
        with self.driver.on(self.rank):
            raw = values.contiguous().view(torch.uint8).numpy().reshape(*view.shape, item)
            self.driver.store(view.data_ptr(), raw, (view.stride(0) * item, item, 1))

    def read(self, name: str) -> torch.Tensor:
        view = self.views[name]
        item = view.element_size()
        with self.driver.on(self.rank):
            raw = self.driver.load(view.data_ptr(), (*view.shape, item), (view.stride(0) * item, item, 1))
        return torch.from_numpy(raw.copy()).view(view.dtype).view(view.shape)

    def comes_anew(self) -> None:
        """Other memory at the same addresses, undefined."""
        before = self.held
        self.driver.drop(self.driver.spaces[self.rank].mapped.pop(self.base))
        self.held = self.driver.make(before.size, classic=before.classic, shareable=before.shareable)
        self.driver.spaces[self.rank].mapped[self.base] = self.held

    def poison(self) -> None:
        self.held.held[:] = 0xFF

    def flip(self, name: str) -> None:
        """One bit of the last element."""
        view = self.views[name]
        at = (
            view.data_ptr()
            - self.base
            + ((view.shape[0] - 1) * view.stride(0) + view.shape[1] - 1) * view.element_size()
        )
        self.held.held[at] ^= 1


OPENED: list[Ranks] = []


class Ranks:
    """Trainers and engines that meet as the bulk path has it: the trainers' weights are ``w0``, ``w1`` … each."""

    def __init__(
        self,
        driver: PlayedDriver,
        trainers: Sequence[Weights],
        engines: Sequence[Weights],
        plan: Sequence[Message],
        *,
        timeout_s: float = 5.0,
        pulls: str = "",
        sleeps: bool | None = None,
        landed: Callable[[int], None] | None = None,
    ):
        OPENED.append(self)
        self.driver, self.owners, self.trainers = driver, [*trainers, *engines], len(trainers)
        self.transports = []
        for owner in self.owners:
            rounds = [tuple(m for m in plan if owner.rank == end(m)) for end in (_source, _destination)]
            self.transports.append(
                IpcTransport(
                    owner.rank,
                    Plan(owner.rank, (rounds[0],), (rounds[1],), "", {}),
                    "full",
                    torch.device("cuda", owner.rank),
                    timeout_s,
                    lambda stage: None,
                    lambda rank: f"refit rank {rank}",
                    pulls=pulls if owner.rank >= self.trainers else "",
                    sleeps=sleeps,
                    landed=landed if owner.rank >= self.trainers else None,
                )
            )

    def bind(self) -> int:
        """How often all had to describe their memory."""
        everyone = range(len(self.owners))
        told, described = [self.on(rank, self._described) for rank in everyone], 1
        while {self.on(rank, lambda one: one.asks_again(told)) for rank in everyone} == {True}:  # noqa: B023
            told, described = [self.on(rank, self._described) for rank in everyone], described + 1
        for rank in everyone:
            self.on(rank, lambda one: one.connect(told))
        return described

    def run(self, *ranks: int) -> list[Any]:
        return [
            self.on(rank, lambda one: one.run(StageClock(CPU))) for rank in ranks or range(len(self.owners))
        ]

    def on(self, rank: int, do: Any) -> Any:
        with self.driver.on(rank):
            return do(self.transports[rank])

    def refit(self) -> list[Any]:
        for rank in range(len(self.owners)):
            self.on(rank, IpcTransport.synchronize)
        return self.run()

    def close(self) -> None:
        for rank in range(len(self.owners)):
            self.on(rank, IpcTransport.close)
        self.driver.drop_signals()
        assert {held.references for held in self.driver.alive.values()} == {1}, "mapped still"

    def _described(self, one: IpcTransport) -> Any:
        one.bind(self.owners[one.rank].fragments)
        return json.loads(json.dumps(one.describe()))


def _source(message: Message) -> int:
    return message.source


def _destination(message: Message) -> int:
    return message.destination


def message(source: int, destination: int, weights: Mapping[str, tuple[Shape, torch.dtype]]) -> Message:
    segments, at = [], 0
    for name, (shape, dtype) in weights.items():
        nbytes = int(np.prod(shape)) * dtype.itemsize
        segments.append(Segment(name, box_of(shape), at, nbytes))
        at += -(-nbytes // 16) * 16
    return Message(source, destination, source, tuple(segments), at + 16, source)


SHAPES = {"a": ((5, 24), BF16), "b": ((300, 33), BF16)}


@pytest.fixture
def driver() -> Iterator[PlayedDriver]:
    with played(3) as driver:
        yield driver
        # Whatever a test ended with: descriptors that are still served would be closed under the next one.
        while OPENED:
            ranks = OPENED.pop()
            for rank in range(len(ranks.owners)):
                ranks.on(rank, lambda one: one.close(failed=True))


def two(driver: PlayedDriver, **options: Any) -> tuple[Weights, Weights, Ranks]:
    trainer = Weights(driver, 0, SHAPES, shareable=True)
    engine = Weights(driver, 1, SHAPES, shareable=False)
    return trainer, engine, Ranks(driver, [trainer], [engine], [message(0, 1, SHAPES)], **options)


def change(trainer: Weights, seed: int) -> None:
    for name, view in trainer.views.items():
        trainer.write(
            name, torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)).to(view.dtype)
        )


def require_equal(trainer: Weights, engine: Weights) -> None:
    for name in trainer.views:
        assert torch.equal(trainer.read(name).view(torch.uint8), engine.read(name).view(torch.uint8)), name


@pytest.mark.parametrize("sleeps", [None, False], ids=["trainer leaves", "trainer stays"])
def test_changed_weights_land_bit_for_bit_in_memory_that_nobody_can_map(
    driver: PlayedDriver, sleeps: bool | None
) -> None:
    trainer, engine, ranks = two(driver, sleeps=sleeps)
    assert ranks.bind() == 2
    assert (
        "refit rank 1 pulls: refit rank 1 says the parameters' GPU memory can't be shared"
        in ranks.transports[0].remark
    )
    for seed in (1, 2, 3):
        change(trainer, seed)
        engine.poison()
        results = ranks.refit()
        require_equal(trainer, engine)
        assert (
            results[1].verified_bytes
            == results[1].payload_bytes
            == sum(v.nbytes for v in trainer.views.values())
        )
        # What a trainer gives back between refits is mapped by nobody then.
        assert trainer.held.references == (1 if sleeps is None else 3)
        moved = [ranks.on(rank, IpcTransport.moved) for rank in (0, 1)]
        assert moved == [sleeps is None] * 2
        if any(moved):
            assert ranks.bind() == 1
    ranks.close()


def test_memory_of_cudamalloc_that_comes_back_where_it_was_keeps_the_receivers_table(
    driver: PlayedDriver,
) -> None:
    """A trainer that leaves: its memory is freed by the driver, and comes anew at the same addresses, or the handle opens elsewhere."""
    trainer = Weights(driver, 0, SHAPES, shareable=True, classic=True)
    engine = Weights(driver, 1, SHAPES, shareable=False)
    ranks = Ranks(driver, [trainer], [engine], [message(0, 1, SHAPES)])
    ranks.bind()
    receiver, opened, tables = ranks.transports[1], [], []
    for turn in range(5):
        change(trainer, turn)
        engine.poison()
        ranks.refit()
        require_equal(trainer, engine)
        opened.append(receiver.handles_opened())
        tables.append(receiver._launches[0][0])
        assert trainer.held.references == 1, "else the driver would keep what the trainer frees"
        trainer.comes_anew()
        if turn == 2:
            # Something else takes the addresses where the receiver had it.
            driver.spaces[1].reserve(trainer.held.size)
        assert ranks.bind() == 1
    assert [a is b for a, b in pairwise(tables)] == [True, True, False, True]
    # The weights, and the trainer's signals in memory of its own. Where one handle opened elsewhere, all are opened once more.
    assert opened[:3] == [2, 1, 1]
    assert opened[4] == 1
    assert opened[3] == 1 + 2
    assert ranks.transports[0].handles_opened() == 0
    ranks.close()


def test_a_receiver_pulls_from_several_senders_beside_one_that_is_written(driver: PlayedDriver) -> None:
    part = {"a": SHAPES["a"]}
    trainer = Weights(driver, 0, SHAPES, shareable=True, classic=True)
    engines = [Weights(driver, 1, SHAPES, shareable=True), Weights(driver, 2, part, shareable=False)]
    ranks = Ranks(driver, [trainer], engines, [message(0, 1, SHAPES), message(0, 2, part)])
    ranks.bind()
    for seed in (1, 2):
        change(trainer, seed)
        for engine in engines:
            engine.poison()
        ranks.refit()
        require_equal(trainer, engines[0])
        assert torch.equal(trainer.read("a"), engines[1].read("a"))
        ranks.bind()
    ranks.close()


def test_all_receivers_pull_if_they_are_asked_to(driver: PlayedDriver) -> None:
    trainers = [Weights(driver, rank, {f"w{rank}": SHAPES["b"]}, shareable=True) for rank in (0, 1)]
    wanted = {"w0": SHAPES["b"], "w1": SHAPES["b"]}
    engine = Weights(driver, 2, wanted, shareable=True)
    plan = [message(rank, 2, {f"w{rank}": SHAPES["b"]}) for rank in (0, 1)]
    ranks = Ranks(driver, trainers, [engine], plan, pulls="the test says so", sleeps=False)
    ranks.bind()
    for seed in (1, 2):
        for trainer in trainers:
            change(trainer, 10 * seed + trainer.rank)
        engine.poison()
        ranks.refit()
        for trainer in trainers:
            assert torch.equal(trainer.read(f"w{trainer.rank}"), engine.read(f"w{trainer.rank}"))
    assert engine.held.references == 1
    ranks.close()


def test_a_trainers_weight_of_which_elements_share_a_place_is_refused_by_name_before_anybody_reads_it(
    driver: PlayedDriver,
) -> None:
    trainer, _, ranks = two(driver, sleeps=False)
    trainer.views["b"] = trainer.views["b"][:1].expand(300, 33)
    with pytest.raises(TransportUnavailable) as refused:
        ranks.bind()
    assert (refused.value.parameter, refused.value.rank, refused.value.stage) == ("b", 0, "bind")


def test_nothing_is_read_before_the_sender_says_so(driver: PlayedDriver) -> None:
    trainer, engine, ranks = two(driver, sleeps=False)
    ranks.bind()
    change(trainer, 1)
    engine.poison()
    for rank in (0, 1):
        ranks.on(rank, IpcTransport.synchronize)
    waiting = threading.Thread(target=ranks.run, args=(1,))
    waiting.start()
    time.sleep(0.1)
    assert (engine.held.held == 0xFF).all()
    # As a gather that is finished only now.
    change(trainer, 2)
    ranks.run(0)
    waiting.join(20)
    require_equal(trainer, engine)
    ranks.close()


def test_a_sender_that_died_is_an_error_that_names_it_and_its_memory_is_let_go_of(
    driver: PlayedDriver,
) -> None:
    trainer, engine, ranks = two(driver, timeout_s=1.0, sleeps=False)
    ranks.bind()
    change(trainer, 1)
    ranks.refit()
    ranks.on(1, IpcTransport.synchronize)
    engine.poison()
    with pytest.raises(RefitTimeout, match="refit rank 0 did not finish") as raised:
        ranks.run(1)
    assert (raised.value.rank, raised.value.stage) == (1, "transfer")
    assert (engine.held.held == 0xFF).all()
    ranks.on(1, lambda one: one.close(failed=True))
    assert trainer.held.references == 2, "the sender's own and its handle"
    ranks.close()


def test_a_sender_that_dies_while_it_is_read_ends_the_refit_though_the_bytes_are_there(
    driver: PlayedDriver,
) -> None:
    trainer, _, ranks = two(driver, timeout_s=1.0, sleeps=False)
    ranks.bind()
    change(trainer, 1)
    sender = ranks.transports[0]
    sender._sent_checksums.prepare = lambda refit: 1 // 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        ranks.refit()
    with pytest.raises(RefitTimeout, match="refit rank 0 did not finish"):
        ranks.run(1)
    ranks.close()


def test_weights_that_had_moved_as_they_were_read_are_void_on_both_sides(driver: PlayedDriver) -> None:
    trainer, engine, ranks = two(driver, sleeps=False)
    ranks.bind()
    for moved in (False, True, False):
        change(trainer, 3 + moved)
        sender = ranks.transports[0]
        sender._memory = SimpleNamespace(still_mapped=lambda: True, confirm_unmoved=lambda: None)  # type: ignore[assignment]
        assert sender.check_during_run(lambda moved=moved: moved)
        assert [result.void for result in ranks.refit()] == [moved] * 2
    require_equal(trainer, engine)
    ranks.close()


@pytest.mark.parametrize("where", ["the engine's", "the trainer's"])
def test_a_byte_that_changes_on_the_way_or_at_the_trainer_is_found(driver: PlayedDriver, where: str) -> None:
    trainer, engine, ranks = two(driver, sleeps=False)
    ranks.bind()
    change(trainer, 1)
    ranks.refit()
    receiver = ranks.transports[1]
    launch = receiver._launches[0][0].launch
    damaged = engine if where == "the engine's" else trainer

    def launch_and_damage() -> None:
        if damaged is trainer:
            trainer.flip("b")
        launch()
        if damaged is engine:
            engine.flip("b")

    receiver._launches[0][0] = SimpleNamespace(launch=launch_and_damage)  # type: ignore[call-overload]
    with pytest.raises(VerificationError) as raised:
        ranks.refit()
    assert (raised.value.rank, raised.value.parameter) == (1, "a")  # the first of the message
    ranks.close()


def test_a_trainers_memory_that_can_not_be_mapped_either_is_refused(driver: PlayedDriver) -> None:
    trainer = Weights(driver, 0, SHAPES, shareable=False)
    engine = Weights(driver, 1, SHAPES, shareable=False)
    ranks = Ranks(driver, [trainer], [engine], [message(0, 1, SHAPES)])
    with pytest.raises(TransportUnavailable, match="without shareable handles"):
        ranks.bind()


def test_weights_are_cast_and_quantized_as_they_are_read(driver: PlayedDriver) -> None:
    shape = (300, 256)
    made = encoded_fragments(
        Fragment("q", shape, box_of(shape), torch.empty(shape, dtype=BF16)), Fp8Blockwise(), CPU
    )
    assert isinstance(made, list)
    (codes, scales), cast = made, Cast(BF16)
    held = Weights(driver, 0, {"q": (shape, BF16), "c": ((20, 30), FP32)}, {"c": cast}, shareable=True)
    view = held.views["q"]
    fragments = [
        Fragment("q", shape, codes.box, view, codes.encoding),
        Fragment("q_scale_inv", scales.full_shape, scales.box, view, scales.encoding),
        held.fragments[1],
    ]
    wanted = {
        "q": (shape, torch.float8_e4m3fn), "q_scale_inv": (scales.full_shape, FP32), "c": ((20, 30), BF16)
    }  # fmt: skip
    engine = Weights(driver, 1, wanted, shareable=False)
    source: Any = SimpleNamespace(rank=0, fragments=fragments)
    ranks = Ranks(driver, [source], [engine], [message(0, 1, wanted)])
    for seed in (1, 2):
        ranks.bind()
        change(held, seed)
        engine.poison()
        assert ranks.refit()[1].verified_bytes
        expected = Fp8Blockwise().encode(held.read("q"))
        assert torch.equal(engine.read("q").view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(engine.read("q_scale_inv"), expected[1])
        assert torch.equal(engine.read("c"), held.read("c").to(BF16))
    ranks.close()


def test_a_receiver_reads_the_global_scale_by_which_it_quantizes(driver: PlayedDriver) -> None:
    shape, parts = (24, 64), {"q": (24, 32), "q_scale": (24, 4)}
    held = Weights(driver, 0, {"q": (shape, BF16), "g": ((1, 1), FP32)}, shareable=True)
    method, scale = WholeBlocks(Nvfp4()), GlobalScale(held.views["g"][0, 0])
    encodings = dict(zip(parts, (Codes(method, scale), Scales(method, scale)), strict=True))
    fragments = [Fragment(n, parts[n], box_of(parts[n]), held.views["q"], e) for n, e in encodings.items()]
    wanted = {"q": (parts["q"], torch.uint8), "q_scale": (parts["q_scale"], torch.float8_e4m3fn)}
    engine = Weights(driver, 1, wanted, shareable=False)
    ranks = Ranks(driver, [SimpleNamespace(rank=0, fragments=fragments)], [engine], [message(0, 1, wanted)])  # type: ignore[list-item]
    for seed in (1, 2):
        ranks.bind()
        change(held, seed)
        held.write("g", torch.full((1, 1), 0.125 * seed))
        engine.poison()
        assert ranks.refit()[1].verified_bytes
        expected = Nvfp4().encode(held.read("q"), torch.tensor(0.125 * seed))
        assert torch.equal(engine.read("q"), expected[0])
        assert torch.equal(engine.read("q_scale").view(torch.uint8), expected[1].view(torch.uint8))
    ranks.close()


def test_parts_of_blocks_are_refused_by_name(driver: PlayedDriver) -> None:
    box = ((0, 200), (0, 256))
    made = encoded_fragments(
        Fragment("q", (300, 256), box, torch.empty(200, 256, dtype=BF16)), Fp8Blockwise(), CPU
    )
    assert isinstance(made, list)
    held = Weights(driver, 0, {"q": ((200, 256), BF16)}, {"q": made[0].encoding}, shareable=True)
    wanted = {"q": ((200, 256), torch.float8_e4m3fn)}
    ranks = Ranks(driver, [held], [Weights(driver, 1, wanted, shareable=False)], [message(0, 1, wanted)])
    with pytest.raises(TransportUnavailable) as raised:
        ranks.bind()
    assert raised.value.parameter == "q"


@pytest.mark.parametrize(
    "lie",
    [
        lambda d: d["encodings"].__setitem__(0, {"kind": "unknown", "held": "float32"}),
        lambda d: d["encodings"].__setitem__(0, {"kind": "cast", "held": "float32", "dtype": "float64"}),
        lambda d: d["encodings"].__setitem__(0, {"kind": "cast", "held": "bfloat16", "dtype": "bfloat16"}),
        lambda d: d["shared"]["1"]["encoded"]["0"].__setitem__(1, 19),
        lambda d: d["shared"]["1"]["encoded"]["0"].__setitem__(4, 21),
        lambda d: d["shared"].clear(),
    ],
)
def test_what_a_sender_tells_of_its_memory_is_not_trusted(driver: PlayedDriver, lie: Any) -> None:
    held = Weights(driver, 0, {"c": ((20, 30), FP32)}, {"c": Cast(BF16)}, shareable=True)
    wanted = {"c": ((20, 30), BF16)}
    ranks = Ranks(driver, [held], [Weights(driver, 1, wanted, shareable=False)], [message(0, 1, wanted)])
    ranks.bind()
    told = [ranks.on(rank, ranks._described) for rank in (0, 1)]
    lie(told[0])
    with pytest.raises(RefitMismatch):
        ranks.on(1, lambda one: one.connect(told))
