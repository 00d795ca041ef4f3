"""The order of a sender's copies: small slices, all receivers in turn, and each sender begins with another receiver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...packing import EncodedView, Strided, copy_rows, row_bytes
from ...packing.rows import Ints

# A slice is small beside what a GPU has under way at a time (some 16 MiB), so that it always writes to several
# receivers, and large beside a tile of the kernel.
SLICE_BYTES = 1 << 20

# What is encoded on the way, and the peer's memory that it goes to: equal shapes and item sizes.
EncodedWrite = tuple[EncodedView, Strided]


def rows_in_turns(writes: Mapping[int, Sequence[tuple[Strided, Strided]]], first: int) -> Ints:
    """Rows of a table of copies that serves all receivers alike.

    Args:
        writes: by receiver: local memory, and the peer's that it goes to.
        first: as :func:`turns` has it.

    Raises:
        ValueError: the two sides have different shapes or item sizes, or a target has elements that share a place.
    """
    rows = [copy_rows(writes[receiver], SLICE_BYTES) for receiver in sorted(writes)]
    order = turns([row_bytes(held) for held in rows], first)
    return np.concatenate(rows)[order] if rows else copy_rows(())


def encoded_in_turns(writes: Mapping[int, Sequence[EncodedWrite]], first: int) -> list[EncodedWrite]:
    """Slices of what is encoded, in an order that serves all receivers alike; as :func:`rows_in_turns` otherwise."""
    if len(writes) == 1:
        # Nobody to take turns with, and slicing what is encoded takes longer than all else that a binding does.
        return list(*writes.values())
    cut = [[part for whole in writes[receiver] for part in slices(whole)] for receiver in sorted(writes)]
    order = turns([np.array([view.nbytes for view, _ in held], dtype=np.int64) for held in cut], first)
    found = [part for held in cut for part in held]
    return [found[place] for place in order]


def slices(write: EncodedWrite, most: int = SLICE_BYTES) -> Iterator[EncodedWrite]:
    """Cut along whole blocks into parts of at most ``most`` elements of what is held, or of one row of blocks."""
    source, target = write
    for strip in source.strips(most):
        yield source.slice(strip), target.slice(strip)


def turns(sizes: Sequence[Ints], first: int) -> Ints:
    """An order of all parts in which every receiver has got the same share of its bytes at any time.

    Args:
        sizes: for each receiver the bytes of its parts, which stay in their order.
        first: the place among the receivers at which to begin; senders that differ in it do not start at one receiver
            together.

    Returns:
        Places in the row of all receivers' parts, one receiver after another.
    """
    # Measured (two senders, two receivers, one kernel): one receiver after the other takes twice as long.
    if not sizes:
        return np.empty(0, dtype=np.int64)
    shares = [(np.cumsum(held) - held) / max(1, held.sum()) for held in sizes]
    turn = [np.full(len(held), (place - first) % len(sizes)) for place, held in enumerate(sizes)]
    order: Ints = np.lexsort((np.concatenate(turn), np.concatenate(shares)))
    return order
