"""What stands in for the operations of Triton's interpreter computes as GPUs do."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.triton_interpreter import fused


def _nearest(exact: Fraction) -> np.float32:
    """The nearest number of FP32, of two the even one."""
    near = np.float32(float(exact))
    near_by = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(near_by, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.int32)) % 2))


def _drawn(seed: int, count: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    # Few bits, so that sums are ties, or all but ties.
    return (draw.integers(-(2**13), 2**13, count) * 2.0 ** draw.integers(-70, 20, count)).astype(np.float32)


@pytest.mark.parametrize("addend", [2.0**-60, -(2.0**-60), 0.0, 2.0**-23, -(2.0**-80), 2.0**-24 + 2.0**-46])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_next_to_a_tie_is_rounded_once(addend: float, sign: int) -> None:
    x, y, z = (np.float32([one]) for one in (sign * (1 + 2.0**-12), 1 + 2.0**-12, addend))
    exact = Fraction(float(x[0])) * Fraction(float(y[0])) + Fraction(float(z[0]))
    assert fused(x, y, z).tolist() == [_nearest(exact)]


def test_products_and_sums_of_all_sizes_are_rounded_once() -> None:
    x, y, z = (_drawn(seed, 20000) for seed in (0, 1, 2))
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    assert fused(x, y, z).tolist() == [_nearest(one) for one in exact]


def test_infinities_and_nan_come_out_as_of_any_sum() -> None:
    infinite, one = np.float32(np.inf), np.float32(1)
    x, y, z = np.float32([[infinite, one, infinite], [one, one, one], [one, -infinite, -infinite]])
    found = fused(x, y, z)
    assert found[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(found[2])
    assert np.isnan(fused(x, y, np.float32([np.nan] * 3))).all()
