"""The order of a sender's writes: nothing lost or doubled, all receivers served alike."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.packing import EncodedView, Strided, row_bytes
from rlrefit.integration.quantize.formats import Codes, Fp8Blockwise, WholeBlocks
from rlrefit.integration.transport.ipc.copy_order import (
    SLICE_BYTES,
    encoded_in_turns,
    rows_in_turns,
    turns,
)

ROW = 2048  # bytes


def packed(address: int, shape: tuple[int, ...], itemsize: int = 2) -> Strided:
    return Strided.packed(address, shape, itemsize)


@given(st.lists(st.lists(st.integers(1, 50), max_size=12), max_size=5), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_every_receiver_has_the_same_share_of_its_bytes_at_any_time(
    sizes: list[list[int]], first: int
) -> None:
    order = turns([np.array(held, dtype=np.int64) for held in sizes], first).tolist()
    parts = [(receiver, number) for receiver, held in enumerate(sizes) for number in range(len(held))]
    assert sorted(order) == list(range(len(parts)))
    totals = [sum(held) for held in sizes]
    done = [0] * len(sizes)
    given_out = [0] * len(sizes)
    for receiver, number in (parts[place] for place in order):
        assert number == given_out[receiver], "parts of a receiver stay in their order"
        # Whoever is served next is the one that is furthest behind.
        shares = [done[r] / total for r, total in enumerate(totals) if total]
        assert done[receiver] / totals[receiver] == pytest.approx(min(shares))
        done[receiver] += sizes[receiver][number]
        given_out[receiver] += 1
    assert done == totals


def test_senders_begin_with_different_receivers() -> None:
    writes = {receiver: [(packed(0, (4,)), packed(receiver, (4,)))] for receiver in (4, 5, 6)}
    assert [rows_in_turns(writes, sender)[0, 1] for sender in range(4)] == [4, 5, 6, 4]


def test_copies_are_cut_small_and_receivers_take_turns() -> None:
    writes = {
        receiver: [(packed(0, (rows, ROW // 2)), packed(receiver << 40, (rows, ROW // 2)))]
        for receiver, rows in ((1, 2048), (2, 1024))
    }
    rows = rows_in_turns(writes, 0)
    assert row_bytes(rows).tolist() == [SLICE_BYTES] * 6
    assert (rows[:, 1] >> 40).tolist() == [1, 2, 1, 1, 2, 1]
    assert sorted(rows[rows[:, 1] >> 40 == 1, 0].tolist()) == [i * SLICE_BYTES for i in range(4)]
    assert rows_in_turns({}, 0).shape == (0, rows.shape[1])


def test_two_sides_of_different_geometry_are_refused() -> None:
    for target in (packed(0, (4, 5)), packed(0, (5, 4), 4)):
        with pytest.raises(ValueError, match="wrong place"):
            rows_in_turns({1: [(packed(0, (5, 4)), target)]}, 0)


def test_what_is_computed_is_cut_along_blocks_and_takes_turns_as_well() -> None:
    held = torch.empty(4096, 1024, dtype=torch.bfloat16)
    codes = Codes(WholeBlocks(Fp8Blockwise()))
    writes = {
        receiver: [(EncodedView(held, codes, ((0, n), (0, 1024))), packed(receiver << 40, (n, 1024), 1))]
        for receiver, n in ((1, 4096), (2, 2048))
    }
    found = encoded_in_turns(writes, 0)
    assert [target.address >> 40 for _, target in found] == [1, 2, 1, 1, 2, 1]
    ends: dict[int, int] = defaultdict(int)
    for source, target in found:
        receiver, offset = target.address >> 40, target.address & ((1 << 40) - 1)
        assert source.window == ((offset // 1024, offset // 1024 + 1024), (0, 1024))
        assert ends[receiver] == offset, "each goes on where the last one ended"
        ends[receiver] += target.nbytes
    assert dict(ends) == {1: 4096 * 1024, 2: 2048 * 1024}
