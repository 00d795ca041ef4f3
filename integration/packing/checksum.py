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
import torch

# Words whose weights are made at a time, and kept.
_BLOCK = 1 << 16


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
    # as_strided, since one element counts as contiguous whatever its stride is, and could not be seen as bytes.
    flat = view.detach().contiguous().as_strided((view.numel(),), (1,))
    raw = flat.view(torch.uint8).numpy()
    start = offset // 4
    before = offset - 4 * start
    padded = np.pad(raw, (before, -(before + raw.size) % 4))
    words = padded.view("<u4").astype(np.uint64)
    total = np.zeros(2, dtype=np.uint64)
    done = 0
    while done < words.size:
        block, inside = divmod(start + done, _BLOCK)
        part = words[done : done + _BLOCK - inside]
        total += _weights(block)[:, inside : inside + part.size] @ part
        done += part.size
    return torch.from_numpy(total.view(np.int64))


@lru_cache(maxsize=32)
def _weights(block: int) -> np.ndarray:
    """``mix(2i + j)`` for the words of a block: uint64 of shape ``[2, _BLOCK]``."""
    x = 2 * np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
    x = np.stack((x, x + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
