"""In which order a sender writes: small pieces, all receivers in turn, each sender beginning with another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
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
    """Cut a write along its outer dimensions into parts of at most ``most`` bytes, or of one element.

    Raises:
        ValueError: the two sides have different shapes or item sizes.
    """
    source, target = write
    if isinstance(source, EncodedView):
        for strip in source.strips(most):
            yield Write(source.slice(strip), target.slice(strip))
        return
    if source.shape != target.shape or source.itemsize != target.itemsize:
        raise ValueError(
            f"memory of shape {source.shape} and item size {source.itemsize} can't be written to {target.shape} and "
            f"{target.itemsize}; bytes would land in the wrong place"
        )
    for cut in _cuts(source.shape, source.strides, target.strides, source.itemsize, most):
        yield Write(
            Strided(source.address + cut.from_source, cut.shape, source.strides, source.itemsize),
            Strided(target.address + cut.from_target, cut.shape, target.strides, target.itemsize),
        )


class _Cut(NamedTuple):
    """A part: bytes from the first element of either side to its first, and its shape."""

    from_source: int
    from_target: int
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def _cuts(
    shape: tuple[int, ...],
    of_source: tuple[int, ...],
    of_target: tuple[int, ...],
    itemsize: int,
    most: int,
) -> tuple[_Cut, ...]:
    """Where to cut memory of one shape, which most weights of a model share; ``of_…`` are strides in bytes."""
    nbytes = prod(shape) * itemsize
    dim = next((i for i, n in enumerate(shape) if n > 1), None)
    if nbytes <= most or dim is None:
        return (_Cut(0, 0, shape),)
    step = -(-shape[dim] // -(-nbytes // most))
    found = []
    for start in range(0, shape[dim], step):
        part = (*shape[:dim], min(step, shape[dim] - start), *shape[dim + 1 :])
        found += [
            _Cut(
                start * of_source[dim] + inner.from_source,
                start * of_target[dim] + inner.from_target,
                inner.shape,
            )
            for inner in _cuts(part, of_source, of_target, itemsize, most)
        ]
    return tuple(found)


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
