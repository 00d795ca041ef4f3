"""MXFP8 against OCP's formula in exact arithmetic, and vLLM."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.quantize import mxfp8
from rlrefit.integration.quantize.mxfp8 import Rounding

from .scalars import E4M3, floor_log2, nearest
from .weights import weights

ROUNDINGS = st.sampled_from(Rounding)
quick = settings(max_examples=60, deadline=None)
rows_of_blocks = st.integers(1, 5).map(lambda n: 32 * n)


def exact_byte(amax: float, rounding: Rounding) -> int:
    if amax == 0:
        return 0
    if rounding is Rounding.DOWN:
        return max(0, floor_log2(Fraction(amax)) - 8 + 127)
    share = Fraction(float(np.float32(amax) * np.float32(1 / 448)))
    if not share:
        return 0
    exponent = floor_log2(share)
    return max(0, exponent + (share != Fraction(2) ** exponent) + 127)


@settings(max_examples=15, deadline=None)
@given(weights(st.integers(1, 3), st.just(64), special=False), ROUNDINGS)
def test_every_byte_is_what_exact_arithmetic_gives(w: torch.Tensor, rounding: Rounding) -> None:
    q, scales = mxfp8.quantize(w, rounding)
    for row, column in product(range(w.shape[0]), range(w.shape[1] // 32)):
        elements = w[row, column * 32 : column * 32 + 32].tolist()
        byte = exact_byte(max(map(abs, elements)), rounding)
        assert scales[row, column] == byte
        codes = q.view(torch.uint8)[row, column * 32 : column * 32 + 32].tolist()
        for element, code in zip(elements, codes, strict=True):
            assert code & 127 == nearest(Fraction(element) / Fraction(2) ** (byte - 127), E4M3)
            assert code >> 7 == int(np.signbit(element))


@quick
@given(weights(st.integers(1, 6), rows_of_blocks, special=False), ROUNDINGS)
def test_vllm_reads_the_values(w: torch.Tensor, rounding: Rounding) -> None:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

    q, scales = mxfp8.quantize(w, rounding)
    assert torch.equal(mxfp8.dequantize(q, scales, dtype=torch.bfloat16), dequant_mxfp8_to_bf16(q, scales))
    # A second quantization changes no value.
    once = mxfp8.dequantize(q, scales)
    assert torch.equal(mxfp8.dequantize(*mxfp8.quantize(once, rounding)), once)
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8.quantize(w[:, 1:], rounding)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(
    value: float, rounding: Rounding
) -> None:
    w = torch.ones(2, 64)
    w[1, 40] = value
    q, scales = mxfp8.quantize(w, rounding)
    assert scales[1, 1] == 255
    back = mxfp8.dequantize(q, scales)
    assert torch.equal(back.isnan(), torch.tensor([[False, False], [False, True]]).repeat_interleave(32, 1))
    assert torch.equal(back[0], w[0])


@pytest.mark.parametrize("rounding", Rounding)
def test_the_largest_and_the_smallest_numbers_of_fp32_survive(rounding: Rounding) -> None:
    w = torch.zeros(3, 32)
    w[0, 0] = torch.finfo(torch.float32).max
    w[1, 0] = 448 * 2.0**-127
    w[2, 0] = 2.0**-136
    back = mxfp8.dequantize(*mxfp8.quantize(w, rounding))
    top = 2.0**128 - (0 if rounding is Rounding.UP else 2.0**125)
    assert back[:, 0].tolist() == [torch.inf if top == 2.0**128 else top, 448 * 2.0**-127, 2.0**-136]
