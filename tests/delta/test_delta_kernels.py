"""The kernels of deltas, interpreted on a CPU, against their counterparts there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.delta import applier as applier_module
from rlrefit.integration.delta import blocks
from rlrefit.integration.delta import packer as module
from rlrefit.integration.delta import steps as steps_module
from rlrefit.integration.delta.applier import DeviceApplier, HostApplier, make_scratch
from rlrefit.integration.delta.mask import DeviceRecorder, HostRecorder, Mask
from rlrefit.integration.delta.packer import (
    Base,
    DeviceMaskPacker,
    DevicePacker,
    HostMaskPacker,
    HostPacker,
    Room,
)
from rlrefit.integration.delta.steps import encoding_scratch
from rlrefit.integration.delta.streams import Stream
from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import Cast
from rlrefit.integration.plan import Message, Segment
from rlrefit.integration.quantize import fp8_blockwise, mxfp8
from rlrefit.integration.quantize.formats import Fp8Blockwise, Mxfp8
from rlrefit.integration.transport.storage import LiveViews
from rlrefit.integration.weights.quantizing import encoded_fragments
from tests.triton_interpreter import run_interpreted

CPU = torch.device("cpu")
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def strided(shape: Sequence[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Storage with gaps, or transposed, or plain."""
    if kind == "gaps":
        return torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]
    if kind == "transposed":
        return torch.zeros(tuple(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))
    return torch.zeros(tuple(shape), dtype=dtype)


def fill(view: torch.Tensor, share: float, generator: torch.Generator) -> None:
    """Change a share of the elements."""
    other = torch.randint(-100, 100, view.shape, generator=generator, dtype=torch.int64).to(view.dtype)
    view.copy_(torch.where(torch.rand(view.shape, generator=generator) < share, other, view))


class Side:
    """The weights of one rank."""

    def __init__(self, weights: Sequence[tuple[str, tuple[int, ...], int]], kinds: Sequence[str]):
        self.views = {
            name: strided(shape, INTS[size], kind)
            for (name, shape, size), kind in zip(weights, kinds, strict=True)
        }
        boxes = {name: tuple((0, n) for n in shape) for name, shape, _ in weights}
        self.live = LiveViews([Fragment(name, v.shape, boxes[name], v) for name, v in self.views.items()])
        segments = tuple(
            Segment(name, boxes[name], 0, v.numel() * v.element_size()) for name, v in self.views.items()
        )
        self.stream = Stream.of([Message(0, 1, 0, segments, 1 << 20, 0)])


def packed(
    packer: Any, room: Room, sections: int
) -> list[tuple[torch.Tensor, torch.Tensor, int, blocks.Counts]]:
    """Blocks of all sections, in as many passes as they need."""
    found, queue = [], list(range(sections))
    # The sums of the others are those that the steps have left.
    packer.begin(range(0, sections, 2))
    while queue:
        section = queue.pop(0)
        packer.pack([section], room)
        room.tell()
        counts = room.told()
        if counts.without_room:
            queue.append(section)
        entries, data = (part.clone() for part in room.payload(counts))
        found.append((entries.view(torch.int64).view(-1, 2), data, packer.itemsizes[section], counts))
    return found


# A packer, what it keeps, room for it, and with a mask what records steps.
Sender = tuple[Any, Any, Room, Any]


def senders(sections: Any, live: LiveViews, stream: Stream) -> list[Sender]:
    """With a base on a CPU and by the kernels, and so with a mask."""
    scratch = encoding_scratch([sections], live, CPU, module._ENCODED_AT_ONCE)
    bases, masks = (
        [Base(stream, CPU, "gpu") for _ in range(2)],
        [Mask(stream, len(sections), CPU) for _ in range(2)],
    )
    made: list[Any] = [
        (HostPacker(sections, live, bases[0], CPU), bases[0], None),
        (DevicePacker(sections, live, bases[1], scratch), bases[1], None),
        (
            HostMaskPacker(sections, live, masks[0], CPU, True),
            masks[0],
            HostRecorder(sections, live, masks[0], CPU),
        ),
        (
            DeviceMaskPacker(sections, live, masks[1], scratch, True),
            masks[1],
            DeviceRecorder(sections, live, masks[1], scratch),
        ),
    ]
    return [(packer, kept, Room(packer.entries, 0, CPU), recorder) for packer, kept, recorder in made]


def change(made: Sequence[Sender], write: Callable[[], object]) -> None:
    """Write weights in a step that is recorded, by all that record."""
    recorded = [
        (recorder, kept, torch.full((kept.stream.nbytes,), 0x55, dtype=torch.uint8))
        for _, kept, _, recorder in made
        if recorder is not None
    ]
    for recorder, _, copy in recorded:
        recorder.keep(copy)
    write()
    for recorder, _, copy in recorded:
        recorder.mark(copy)
    assert torch.equal(*(mask.memory for _, mask, _ in recorded))
    assert torch.equal(*(mask.sums for _, mask, _ in recorded))


def assert_kept_alike(made: Sequence[Sender]) -> None:
    """What is sent is in the bases, and marked no more."""
    for _, kept, _, recorder in made:
        assert int(kept.total) == int(made[0][1].total)
        expected = made[0][1].memory if recorder is None else torch.zeros_like(kept.memory)
        assert torch.equal(kept.memory, expected)


def on_device(stream: Stream, live: LiveViews, total: torch.Tensor) -> DeviceApplier:
    return DeviceApplier(stream, live, total, make_scratch(CPU))


def compare(weights: Any, kinds: Any, shares: Any, seed: int, section: int) -> int:
    """The most passes of a packer."""
    generator = torch.Generator().manual_seed(seed)
    sender, receivers = Side(weights, kinds), [Side(weights, kinds[::-1]) for _ in range(4)]
    sections = sender.stream.sections(section)
    made = senders(sections, sender.live, sender.stream)
    appliers = [
        make(side.stream, side.live, torch.zeros(1, dtype=torch.int64))
        for make, side in zip((HostApplier, on_device) * 2, receivers, strict=True)
    ]

    def step(share: float) -> None:
        for view in sender.views.values():
            fill(view, share, generator)

    passes = 0
    for share in (1.0, *shares):
        change(made, partial(step, share))
        if share == 1.0:
            for packer, *_ in made:
                packer.take()
            for applier, side in zip(appliers, receivers, strict=True):
                for name, view in side.views.items():
                    view.copy_(sender.views[name])
                applier.weigh()
        else:
            totals = []
            # Each side's blocks go to the other kind of receiver.
            for (packer, _, room, _), applier in zip(made, reversed(appliers), strict=True):
                sent = packed(packer, room, len(sections))
                passes = max(passes, len(sent))
                totals.append(sum(counts.changed for *_, counts in sent))
                for entries, data, size, _ in sent:
                    applier.apply(entries, data, size)
            assert len({*totals}) == 1
        assert_kept_alike(made)
        for applier, side in zip(appliers, receivers, strict=True):
            assert int(applier.total) == int(made[0][1].total)
            for name, view in side.views.items():
                assert torch.equal(view, sender.views[name]), name
    return passes


def compare_encoded(encoded_at_once: int, strip: int) -> None:
    """Casts, and codes and scales: of blocks that a fragment has whole, that it cuts, and of a format without a kernel.

    Args:
        encoded_at_once: bytes of a step.
        strip: elements.
    """
    steps_module.CHECKED_AT_ONCE, module._ENCODED_AT_ONCE = strip, encoded_at_once
    generator = torch.Generator().manual_seed(5)
    held = torch.randn(131, 136, generator=generator).bfloat16()
    wide = torch.randn(20, 64, generator=generator)
    fragments = [Fragment("cast", (20, 64), ((0, 20), (0, 64)), wide, Cast(torch.bfloat16))]
    # Rows 0 to 131 of 300, so that others hold the rest of the second row of blocks.
    for name, format, rows in (("whole", Fp8Blockwise(), 131), ("cut", Fp8Blockwise(), 300)):
        found = encoded_fragments(Fragment(name, (rows, 136), ((0, 131), (0, 136)), held), format, CPU)
        assert not isinstance(found, str)
        fragments += found
    fragments[-1].view.fill_(0.25)  # the scales of cut blocks, which ranks make together
    grouped = wide.bfloat16()
    found = encoded_fragments(Fragment("mx", (20, 64), ((0, 20), (0, 64)), grouped), Mxfp8(), CPU)
    assert not isinstance(found, str)
    fragments += found
    live = LiveViews(fragments, CPU)
    segments = tuple(
        Segment(f.name, f.box, 0, prod(b - a for a, b in f.box) * f.dtype.itemsize) for f in fragments
    )
    stream = Stream.of([Message(0, 1, 0, segments, 1 << 20, 0)])
    sections = stream.sections(1 << 14)
    made = senders(sections, live, stream)
    for packer, *_ in made:
        packer.take()

    def step() -> None:
        held[3, 5], held[130, 130], wide[7, 7], grouped[9, 40] = 2.0, -90.0, 3.0, 70.0

    change(made, step)
    changed = []
    for packer, _, room, _ in made:
        with elements_quantized() as quantized:
            changed.append(sum(counts.changed for *_, counts in packed(packer, room, len(sections))))
        # Once each, for codes and scales together.
        assert sum(quantized) == held.numel() + grouped.numel()
    assert len({*changed}) == 1
    assert changed[0] > 3
    assert_kept_alike(made)
    codes, scales = fp8_blockwise.quantize(held)
    for part in stream.parts:
        if part.segment.name.startswith("whole"):
            expected = (codes if part.itemsize == 1 else scales).contiguous().view(torch.uint8).view(-1)
            assert torch.equal(made[1][1].memory[part.start : part.start + part.segment.nbytes], expected)


def compare_largest() -> None:
    """Blocks that are as large as they can be, of weights that begin anywhere in a word of marks."""
    generator = torch.Generator().manual_seed(2)
    weights: Any = [("a", (3, 5), 2), ("b", (256, 304), 2)]
    sender, receivers = Side(weights, ["plain"] * 2), [Side(weights, ["gaps"] * 2) for _ in range(2)]
    sections = sender.stream.sections(1 << 20)
    mask, copy = Mask(sender.stream, len(sections), CPU), torch.zeros(sender.stream.nbytes, dtype=torch.uint8)
    packer = DeviceMaskPacker(
        sections, sender.live, mask, encoding_scratch([sections], sender.live, CPU), False
    )
    recorder = HostRecorder(sections, sender.live, mask, CPU)
    appliers = [
        make(side.stream, side.live, torch.zeros(1, dtype=torch.int64))
        for make, side in zip((HostApplier, on_device), receivers, strict=True)
    ]
    room = Room(packer.entries, 0, CPU)
    for share in (0.01, 0.08):
        recorder.keep(copy)
        for view in sender.views.values():
            fill(view, share, generator)
        recorder.mark(copy)
        for entries, data, size, _ in packed(packer, room, len(sections)):
            assert entries[-1, 0] == 32 + 2 * blocks.MOST or entries[-2, 0] == 32 + 2 * blocks.MOST
            for applier in appliers:
                applier.apply(entries, data, size)
        assert not mask.memory.any()
        assert int(appliers[0].total) == int(appliers[1].total) != 0
        for side in receivers:
            for name, view in side.views.items():
                assert torch.equal(view, sender.views[name]), name


@contextmanager
def elements_quantized() -> Iterator[list[int]]:
    """How many whole blocks have, in each call."""
    found: list[int] = []

    def counting(quantize: Any) -> Any:
        return lambda weight, *rest: found.append(weight.numel()) or quantize(weight, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for numerics in (fp8_blockwise, mxfp8):
            patch.setattr(numerics, "quantize", counting(numerics.quantize))
        yield found


def small_tiles() -> None:
    """Several tiles, and lists of several parts, of few elements."""
    module.TILE = blocks.MOST = 4096
    module.LISTED = applier_module.LISTED = 1024


def compare_encodings() -> None:
    small_tiles()
    compare_encoded(1 << 20, 1 << 20)
    compare_encoded(1 << 14, 1 << 11)


def compare_sizes() -> None:
    small_tiles()
    # Elements of all sizes, shares for each form of block, and several tiles and sections.
    weights: Any = [("a", (70, 130), 2), ("b", (7, 33), 4), ("c", (40, 64, 2), 1), ("d", (), 8)]
    compare(weights, ["plain"] * 4, (0.0, 0.2), 0, 1 << 13)
    weights = [("a", (61, 48), 2), ("c", (33, 40), 1), ("e", (3, 4, 5, 6), 4)]
    compare(weights, ["transposed", "plain", "gaps"], (0.02,), 2, 1 << 13)


def compare_gaps_and_rooms() -> None:
    small_tiles()
    weights: Any = [("a", (61, 47), 2), ("b", (5, 9), 8), ("c", (33, 35), 1), ("e", (3, 4, 5, 6), 4)]
    compare(weights, ["gaps"] * 4, (0.003, 0.99), 1, 1 << 13)
    # Room for less than a section has, so that further passes take the rest.
    module.LEAST_ROOM = 10 << 10
    assert compare([("a", (70, 130), 2)], ["plain"], (0.9,), 7, 1 << 17) > 1


@pytest.mark.parametrize("cases", [compare_largest, compare_encodings, compare_sizes, compare_gaps_and_rooms])
def test_kernels_pack_write_and_weigh_as_a_cpu_does(cases: Callable[[], None]) -> None:
    run_interpreted(cases)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_difference_is_packed_and_written(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(list(INTS)))
    count = data.draw(st.integers(1, 3 * blocks.MOST))
    start = 16 * data.draw(st.integers(0, 1 << 40))
    share = data.draw(st.sampled_from([0.0, 0.001, 0.03, 0.4, 1.0]))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    base = generator.integers(-100, 100, count).astype(f"<i{size}")
    new = np.where(generator.random(count) < share, base + 1, base).astype(base.dtype)
    landed = base.copy()
    room = blocks.Packed(np.zeros((count, 2), dtype=np.int64), np.zeros(size * count + 64, dtype=np.uint8))
    counts = [0] * blocks.COUNTS
    sent = blocks.pack(new, np.flatnonzero(new != base), start, room, counts)
    for entry in room.entries[: counts[0]].tolist():
        first, index, values = blocks.unpack(entry, room.data[: counts[2]], size)
        landed[(first - start) // size + index] = values
    assert np.array_equal(sent, np.flatnonzero(new != base))
    assert np.array_equal(landed, new)
    assert counts[4] == np.count_nonzero(new != base)
    assert counts[2] <= new.nbytes + 16 * counts[0]
    places = blocks.places(start, count, size)
    change = blocks.weigh_change(new[sent], base[sent], places[sent])
    assert blocks.wrapped(blocks.weigh(base, places) + change) == blocks.weigh(new, places)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_block_and_one_for_another_base_change_the_sum(lost: int) -> None:
    generator = np.random.default_rng(lost)
    base = generator.integers(0, 9, 5000).astype("<i2")
    new = np.where(generator.random(5000) < 0.01, base + 1, base).astype("<i2")
    places = blocks.places(64, 5000, 2)
    other = base.copy()
    if lost:
        other[np.flatnonzero(new != base)[3]] -= 1
        changed = blocks.weigh_change(new, other, places)
    else:
        changed = 0
    assert blocks.wrapped(blocks.weigh(base, places) + changed) != blocks.weigh(new, places)
