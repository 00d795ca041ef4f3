"""The checksum of a message: what it is, and its computation with torch and numpy.

A message's bytes are read as little-endian 32-bit words ``w_i``; gaps between its segments count as 0.
The checksum is two sums modulo 2^64, ``c_j = Σ w_i · mix(2i + j)`` for j = 0, 1, where ``mix(x)`` is the
finalizer of splitmix64 (Steele, Lea, Flood, *Fast splittable pseudorandom number generators*, 2014) of
``x · 0x9E3779B97F4A7C15``. Every place has weights of its own, so bytes that change or move show. The sums
are linear in the bytes: each side adds up its own live views in any order and any unit width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ..layout import flat_bytes

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Sums = npt.NDArray[np.uint64]

# Words whose weights are made at a time.
_BLOCK = 1 << 16
# Blocks whose weights are kept, in 32 MiB: those of the first 8 MiB of a message, of which gloo's have no more. Later
# ones are made each time, which takes four times as long as adding up.
_KEPT = 32


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """Checksum of a message's bytes on the CPU: int64 of shape ``[2]``.

    Args:
        raw: contiguous, any dtype.
    """
    return _partial(raw, 0)


class ChecksumViews:
    """Checksums of CPU tensors; the counterpart of :class:`.tables.ChecksumTable`."""

    def __init__(self, views: Sequence[tuple[torch.Tensor, int]], slots: Sequence[int] | None = None):
        self._views = list(views)
        self._slots = list(slots or [0] * len(views))
        self.nbytes = sum(view.nbytes for view, _ in views)

    def compute(self, out: torch.Tensor) -> None:
        """Set ``out`` (int64, ``[2]`` or ``[slots, 2]``) to the checksums."""
        out.zero_()
        self.add_to(out)

    def add_to(self, out: torch.Tensor) -> None:
        """Add the checksums to ``out``."""
        rows = out.view(-1, 2)
        for (view, offset), slot in zip(self._views, self._slots, strict=True):
            rows[slot] += _partial(view, offset)


def _partial(view: torch.Tensor, offset: int) -> torch.Tensor:
    """What a view adds whose packed bytes begin at byte ``offset`` of the message."""
    # Not numpy(), after which torch refuses to free the storage, as trainers do that offload.
    raw = np.from_dlpack(flat_bytes(view.detach().contiguous())).view(np.uint8)
    first = min(-offset % 4, raw.size)
    last = raw.size - (raw.size - first) % 4
    total = _sums(raw[first:last].view("<u4"), (offset + first) // 4)
    if first:
        total += _sums(_word(raw[:first], offset % 4), offset // 4)
    if last < raw.size:
        total += _sums(_word(raw[last:], 0), (offset + last) // 4)
    return torch.from_numpy(total.view(np.int64))


def _word(raw: Bytes, begin: int) -> Words:
    """The word that has ``raw``, fewer than 4 bytes, from byte ``begin`` on, and else 0."""
    whole = np.zeros(4, dtype=np.uint8)
    whole[begin : begin + raw.size] = raw
    return whole.view("<u4")


def _sums(words: Words, start: int) -> Sums:
    """Both sums of words from word number ``start`` of the message on: uint64 of shape ``[2]``."""
    total = np.zeros(2, dtype=np.uint64)
    done = 0
    while done < words.size:
        block, inside = divmod(start + done, _BLOCK)
        part = words[done : done + _BLOCK - inside].astype(np.uint64)
        weights = _kept_weights(block) if block < _KEPT else _weights(block)
        # Of numpy's ways the fastest for integers, which have no BLAS.
        total += np.einsum("ji,i->j", weights[:, inside : inside + part.size], part)
        done += part.size
    return total


def _weights(block: int) -> Sums:
    """``mix(2i + j)`` for the words of a block: uint64 of shape ``[2, _BLOCK]``."""
    x = np.empty((2, _BLOCK), dtype=np.uint64)
    x[0] = np.arange(2 * block * _BLOCK, 2 * (block + 1) * _BLOCK, 2, dtype=np.uint64)
    np.add(x[0], np.uint64(1), out=x[1])
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


_kept_weights = lru_cache(maxsize=_KEPT)(_weights)
