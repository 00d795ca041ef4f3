"""The order of a sender's writes: nothing lost or doubled, all receivers served alike."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.packing import Strided
from rlrefit.integration.transport.ipc.order import Write, interleave, pieces


def packed(address: int, shape: tuple[int, ...], itemsize: int = 2) -> Strided:
    return Strided.packed(address, shape, itemsize)


def elements(view: Strided) -> list[int]:
    places = np.full(view.shape, view.address, dtype=np.int64)
    for dim, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        places += (np.arange(n) * stride).reshape([-1 if i == dim else 1 for i in range(len(view.shape))])
    return places.ravel().tolist()


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_pieces_move_every_element_once_between_the_same_places(shape: tuple[int, ...], most: int) -> None:
    whole = Write(
        packed(1 << 20, shape), Strided(0, shape, tuple(10 ** (5 - i) for i in range(len(shape))), 2)
    )
    cut = list(pieces(whole, most))
    moved = [pair for p in cut for pair in zip(elements(p.source), elements(p.target), strict=True)]
    assert sorted(moved) == sorted(zip(elements(whole.source), elements(whole.target), strict=True))
    assert all(p.source.nbytes <= max(most, 2) for p in cut)


def test_pieces_are_as_large_as_they_may_be() -> None:
    assert len(list(pieces(Write(packed(0, (8, 100)), packed(0, (8, 100))), 800))) == 2
    assert len(list(pieces(Write(packed(0, (8, 100)), packed(0, (8, 100))), 1600))) == 1


@pytest.mark.parametrize("target", [packed(0, (4, 5)), packed(0, (5, 4), 4)])
def test_two_sides_of_different_geometry_are_refused(target: Strided) -> None:
    with pytest.raises(ValueError, match="wrong place"):
        list(pieces(Write(packed(0, (5, 4)), target), 8))


@given(
    st.dictionaries(st.integers(0, 20), st.lists(st.integers(1, 50), max_size=12), max_size=5),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_every_receiver_has_the_same_share_of_its_bytes_at_any_time(
    sizes: dict[int, list[int]], first: int
) -> None:
    writes = {
        receiver: [Write(packed(i, (n,)), packed(receiver, (n,))) for i, n in enumerate(row)]
        for receiver, row in sizes.items()
    }
    ordered = interleave(writes, first)
    for receiver, row in writes.items():
        assert [w for w in ordered if w.target.address == receiver] == row
    totals = {receiver: sum(row) for receiver, row in sizes.items() if row}
    done = dict.fromkeys(totals, 0)
    for write in ordered:
        receiver = write.target.address
        # Whoever is served next is the one that is furthest behind.
        shares = {r: done[r] / total for r, total in totals.items()}
        assert shares[receiver] == pytest.approx(min(shares.values()))
        done[receiver] += prod(write.target.shape)
    assert done == totals


def test_senders_begin_with_different_receivers() -> None:
    writes = {receiver: [Write(packed(0, (4,)), packed(receiver, (4,)))] for receiver in (4, 5, 6)}
    firsts = [interleave(writes, sender)[0].target.address for sender in range(4)]
    assert firsts == [4, 5, 6, 4]
