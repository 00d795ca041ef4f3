"""Slow references in exact arithmetic, written from the formats' definitions."""

from __future__ import annotations

import math
from fractions import Fraction


def small_floats(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> list[Fraction]:
    """The first ``count`` values that are not negative of a format without infinities; the index is the code."""
    values = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        lead = 0 if exponent == 0 else 2**mantissa_bits
        values.append(Fraction(lead + mantissa, 2**mantissa_bits) * Fraction(2) ** (max(exponent, 1) - bias))
    assert exponent < 2**exponent_bits
    return values


E4M3 = small_floats(4, 3, bias=7, count=127)
E2M1 = small_floats(2, 1, bias=1, count=8)


def nearest(value: Fraction, values: list[Fraction]) -> int:
    """Code of the nearest of ``values``, ties to the even code, saturating. The sign is the caller's."""
    value = abs(value)
    return min(range(len(values)), key=lambda code: (abs(values[code] - value), code % 2))


def floor_log2(value: Fraction) -> int:
    exponent = math.floor(math.log2(value.numerator) - math.log2(value.denominator)) + 1
    while Fraction(2) ** exponent > value:
        exponent -= 1
    return exponent
