"""What comes off the wire is looked at before anything of it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.delta import blocks
from rlrefit.integration.delta.applier import DeviceApplier, HostApplier, make_scratch
from rlrefit.integration.delta.packer import Base, HostPacker, Room
from tests.triton_interpreter import run_interpreted

from .test_delta_kernels import CPU, Side, fill

WEIGHTS = [("a", (40, 30), 2), ("b", (7, 33), 2), ("c", (3, 200), 2)]
GUARD = 0x5A


class Scene:
    """A pass over few, some or all changed elements, and an engine that may be written: its weights, and what lies beside them."""

    def __init__(self, share: float, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        sender, self.engine = Side(WEIGHTS, ["plain"] * 3), Side(WEIGHTS, ["gaps"] * 3)
        for name, view in self.engine.views.items():
            self.ground(view).fill_(GUARD)
            view.copy_(sender.views[name])
        sections = sender.stream.sections(1 << 20)
        packer = HostPacker(sections, sender.live, Base(sender.stream, CPU, "gpu"), CPU)
        packer.take()
        for view in sender.views.values():
            fill(view, share, generator)
        room = Room(packer.entries, 0, CPU)
        packer.pack([0], room)
        room.tell()
        entries, data = (part.clone() for part in room.payload(room.told()))
        self.entries, self.data = entries.view(torch.int64).view(-1, 2), data
        total = torch.zeros(1, dtype=torch.int64)
        self.applier = HostApplier(self.engine.stream, self.engine.live, total)

    @staticmethod
    def ground(view: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())

    def memory(self) -> list[torch.Tensor]:
        return [self.ground(view).clone() for view in self.engine.views.values()]

    def beside(self) -> list[torch.Tensor]:
        """What lies beside the weights, and is nobody's to write."""
        found = self.memory()
        for ground, view in zip(found, self.engine.views.values(), strict=True):
            ground.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(GUARD)
        return found


def told(form: int, count: int, elements: int, place: int = 0) -> int:
    number = place // 4 | form << 30 | count - 1 << 32 | elements - 1 << 48
    return number - (number >> 63 << 64)


DAMAGED = [
    (-16, told(blocks.WHOLE, 1, 1)),
    (1 << 40, told(blocks.WHOLE, 1, 1)),
    (2862, told(blocks.WHOLE, 1, 1)),  # in the gap behind the second weight
    (2398, told(blocks.WHOLE, 2, 2)),  # from the first weight to behind it
    (1, told(blocks.WHOLE, 1, 1)),
    (0, told(blocks.WHOLE, 1, 1, place=1 << 30)),
    (0, told(blocks.WHOLE, 1, 1200)),
    (0, told(blocks.WHOLE, 1, 65536)),
    (0, told(blocks.SPARSE, 65536, 65536)),
    (0, told(blocks.BITMAP, 3, 1)),
    (0, told(3, 1, 1)),
    (0, -1),
]


@pytest.mark.parametrize("entry", DAMAGED)
def test_a_block_beyond_the_weights_or_the_data_is_refused_and_nothing_is_written(
    entry: tuple[int, int],
) -> None:
    scene = Scene(0.05)
    before = scene.memory()
    # The whole ones before it are not written either.
    entries = torch.cat([scene.entries, torch.tensor([entry])])
    with pytest.raises(blocks.Damaged):
        scene.applier.apply(entries, scene.data, 2)
    assert all(map(torch.equal, scene.memory(), before))
    assert int(scene.applier.total) == 0
    scene.applier.apply(scene.entries, scene.data, 2)
    assert not all(map(torch.equal, scene.memory(), before))


@pytest.mark.parametrize("form", [blocks.SPARSE, blocks.BITMAP])
def test_an_index_beyond_its_block_is_refused_and_nothing_is_written(form: int) -> None:
    scene = Scene(0.0)
    before = scene.memory()
    data = torch.zeros(64, dtype=torch.uint8)
    # A sparse block's second index is the first beyond it; a bitmap names one element more than were counted.
    data[:3] = torch.tensor([1, 0, 32] if form == blocks.SPARSE else [7, 0, 0])
    with pytest.raises(blocks.Damaged):
        scene.applier.apply(torch.tensor([(0, told(form, 2, 32))]), data, 2)
    assert all(map(torch.equal, scene.memory(), before))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_of_entries_or_data_writes_beside_the_weights(data: st.DataObject) -> None:
    scene = Scene(data.draw(st.sampled_from([0.01, 0.2, 0.9])), data.draw(st.integers(0, 3)))
    held = data.draw(st.sampled_from([scene.entries, scene.data])).view(-1).view(torch.uint8)
    for _ in range(data.draw(st.integers(1, 3))):
        held[data.draw(st.integers(0, held.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before, beside = scene.memory(), scene.beside()
    try:
        scene.applier.apply(scene.entries, scene.data, 2)
    except blocks.Damaged:
        assert all(map(torch.equal, scene.memory(), before))
    assert all(map(torch.equal, scene.beside(), beside))


def write_damaged_blocks() -> None:
    for number in range(8):  # each share of change twice
        scene = Scene(0.05 * (number % 4), number)
        on_device = DeviceApplier(
            scene.engine.stream, scene.engine.live, scene.applier.total, make_scratch(CPU)
        )
        beside = scene.beside()
        entries = torch.cat([scene.entries, torch.tensor(DAMAGED)])
        generator = np.random.default_rng(number)
        for held in (entries, scene.data):
            raw = held.view(-1).view(torch.uint8).numpy()
            if raw.size:
                raw[generator.integers(raw.size, size=3)] ^= generator.integers(
                    1, 256, size=3, dtype=np.uint8
                )
        on_device.apply(entries, scene.data, 2)
        assert all(map(torch.equal, scene.beside(), beside))


def test_kernels_write_no_damaged_block_beside_the_weights() -> None:
    run_interpreted(write_damaged_blocks)


@pytest.mark.parametrize("place", [i for i, name in enumerate(blocks.Header._fields) if name != "total"])
def test_a_header_with_any_bit_changed_is_refused(place: int) -> None:
    header: Any = blocks.Header.of(blocks.Counts(3, 0, 640, 0, 77), 2, last=False, changed=99)
    # The sum is filled in on its way.
    told = header._replace(total=-5)
    assert blocks.Header.read(list(told)) == told
    for bit in range(64):
        numbers = np.array(header, dtype=np.int64)
        numbers[place] ^= np.int64(-(1 << 63)) if bit == 63 else np.int64(1 << bit)
        with pytest.raises(blocks.Damaged):
            blocks.Header.read(numbers.tolist())
