"""In which order a sender writes: small pieces, all receivers in turn, each sender beginning with another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...packing import EncodedView, Strided

# A piece is small beside what a GPU has under way at a time (some 16 MiB), so that it always writes to several
# receivers, and large beside a tile of the kernel.
PIECE_BYTES = 1 << 20


class Write(NamedTuple):
    """Local memory, or what is computed of some, and the peer's memory that it goes to: equal shapes and item sizes."""

    source: Strided | EncodedView
    target: Strided


def pieces(write: Write, most: int = PIECE_BYTES) -> Iterator[Write]:
    """Cut a write along its outer dimensions into parts of at most ``most`` bytes, or of one element."""
    if isinstance(write.source, EncodedView):
        for strip in write.source.strips(most):
            yield Write(write.source.slice(strip), write.target.slice(strip))
        return
    shape, nbytes = write.source.shape, write.source.nbytes
    dim = next((i for i, n in enumerate(shape) if n > 1), None)
    if nbytes <= most or dim is None:
        yield write
        return
    parts = -(-nbytes // most)
    step = -(-shape[dim] // parts)
    for start in range(0, shape[dim], step):
        box = tuple((start, min(start + step, n)) if i == dim else (0, n) for i, n in enumerate(shape))
        part = Write(write.source.slice(box), write.target.slice(box))
        if part.source.nbytes > most:
            yield from pieces(part, most)
        else:
            yield part


def interleave(writes: Mapping[int, Sequence[Write]], first: int) -> list[Write]:
    """All writes in an order in which every receiver has got the same share of its bytes at any time.

    Args:
        writes: by receiver.
        first: the place among the receivers at which to begin; senders that differ in it do not start at one
            receiver together.
    """
    receivers = sorted(writes)
    # Measured (two senders, two receivers, one kernel): one receiver after the other takes twice as long.
    ordered: list[tuple[float, int, Write]] = []
    for place, receiver in enumerate(receivers):
        total = sum(write.source.nbytes for write in writes[receiver]) or 1
        turn = (place - first) % len(receivers)
        done = 0
        for write in writes[receiver]:
            ordered.append((done / total, turn, write))
            done += write.source.nbytes
    ordered.sort(key=lambda entry: entry[:2])
    return [write for _, _, write in ordered]
