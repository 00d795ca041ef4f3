"""What blocks are expected to take, against blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlrefit.integration.delta import blocks


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.97, 1.0])
def test_expected_bytes_are_those_of_differences_drawn_at_random(size: int, share: float) -> None:
    generator, elements, count = np.random.default_rng(size), 4096 // size, 300
    made: list[Any] = []
    for _ in range(count):
        base = np.zeros(elements, dtype=f"<i{size}")
        new = (generator.random(elements) < share).astype(base.dtype)
        counts = [0] * blocks.COUNTS
        room = np.zeros((1, 2), dtype=np.int64), np.zeros(base.nbytes, dtype=np.uint8)
        blocks.pack(new, np.flatnonzero(new != base), 0, blocks.Packed(*room), counts)
        made.append(counts[2] + blocks.ENTRY_BYTES * counts[0])
    expected = blocks.expected_bytes(elements, size, share)
    assert np.mean(made) == pytest.approx(expected, abs=5 * np.std(made) / count**0.5 + 1e-6)
