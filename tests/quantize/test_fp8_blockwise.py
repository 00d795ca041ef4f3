"""FP8 in blocks against vLLM's copy of DeepGEMM's quantizer, and shards against the full tensor."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Box, coverage_gap, overlap
from rlrefit.integration.quantize import blocks, fp8_blockwise
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat

from .weights import cuts, same, weights

FORMATS = st.sampled_from(ScaleFormat)
quick = settings(max_examples=40, deadline=None)


def by_vllm(w: torch.Tensor, block: tuple[int, int], scale: ScaleFormat) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        return per_block_cast_to_fp8(w, list(block), use_ue8m0=scale is ScaleFormat.UE8M0)


small_blocks = st.tuples(st.integers(1, 9), st.integers(1, 9))


@pytest.mark.parametrize(("largest", "blocks"), [(300, st.just((128, 128))), (20, small_blocks)])
@quick
@given(st.data())
def test_bytes_and_scales_are_those_of_vllm(
    largest: int, blocks: st.SearchStrategy[tuple[int, int]], data: st.DataObject
) -> None:
    w = data.draw(weights(st.integers(1, largest), st.integers(1, largest)))
    block, scale = data.draw(blocks), data.draw(FORMATS)
    expected_q, expected_scale = by_vllm(w, block, scale)
    q, scales = fp8_blockwise.quantize(torch.nn.Parameter(w), block, scale)
    assert same(scales, expected_scale)
    assert same(q, expected_q)
    assert q.is_contiguous()
    assert (q.requires_grad, scales.requires_grad) == (False, False)


def test_every_power_of_two_and_its_neighbours_get_the_least_scale_that_holds_them() -> None:
    powers = torch.exp2(torch.arange(-13, 120, dtype=torch.float32))
    edges = torch.cat(
        (powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf)))
    )
    scales = fp8_blockwise.scales_of(edges * 448, ScaleFormat.UE8M0)
    wanted = [2.0 ** next(e for e in range(-30, 130) if 2.0**e >= v) for v in (edges * 448 / 448).tolist()]
    assert scales.tolist() == wanted


@quick
@given(st.data())
def test_straddled_blocks_are_those_with_elements_outside(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    block = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=len(shape))))
    box: Box = tuple(data.draw(st.sampled_from(cuts(data.draw, n))) for n in shape)
    wide = (1,) * (len(shape) - len(block)) + block
    touched, cut = set(), set()
    for element in product(*(range(n) for n in shape)):
        at = tuple(i // b for i, b in zip(element, wide, strict=True))
        inside = all(start <= i < stop for i, (start, stop) in zip(element, box, strict=True))
        (touched if inside else cut).add(at)
    pieces = blocks.straddled(box, shape, block)
    assert overlap(pieces) is None
    assert {at for piece in pieces for at in product(*(range(*r) for r in piece))} == touched & cut
    assert set(product(*(range(*r) for r in blocks.scale_box(box, block)))) == touched


def test_an_empty_box_needs_no_scales_and_cuts_no_block() -> None:
    box: Box = ((130, 130), (0, 256))
    assert blocks.straddled(box, (256, 256), (128, 128)) == []
    assert coverage_gap(blocks.scale_box(box, (128, 128)), []) is None
    q, scales = fp8_blockwise.quantize(torch.empty(0, 256))
    assert (q.shape, scales.shape) == ((0, 256), (0, 2))


@quick
@given(weights(st.integers(1, 20), st.integers(1, 20), special=False), FORMATS)
def test_a_second_quantization_changes_no_value(w: torch.Tensor, scale: ScaleFormat) -> None:
    q, scales = fp8_blockwise.quantize(w, (8, 8), scale)
    once = fp8_blockwise.dequantize(q, scales, block=(8, 8))
    again_q, again_scales = fp8_blockwise.quantize(once, (8, 8), scale)
    if scale is ScaleFormat.UE8M0:
        assert torch.equal(fp8_blockwise.dequantize(again_q, again_scales, block=(8, 8)), once)
    else:
        # A product with 448 and a division by it may miss by the last bit.
        assert same(again_q, q)
        torch.testing.assert_close(again_scales, scales, rtol=2**-23, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scale", ScaleFormat)
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(
    value: float, scale: ScaleFormat
) -> None:
    w = torch.ones(4, 6)
    w[3, 1] = value
    q, scales = fp8_blockwise.quantize(w, (2, 2), scale)
    back = fp8_blockwise.dequantize(q, scales, block=(2, 2))
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[2:4, 0:2] = True
    assert torch.equal(back.isnan(), expected)
    assert torch.equal(back[~expected], torch.ones(20))


def test_values_that_are_not_finite_are_named_with_their_block() -> None:
    w = torch.ones(2, 256, 256)
    w[1, 200, 3] = float("nan")
    amax = fp8_blockwise.block_amax(w, offset=(128, 0))
    with pytest.raises(RefitError, match=r"\[1, 256:384, 0:128\]") as error:
        blocks.require_finite(amax, (128, 128), "gate", offset=(128, 0))
    assert error.value.parameter == "gate"
    blocks.require_finite(amax[:1], (128, 128), "gate")


@pytest.mark.parametrize("w", [torch.ones(2, 2, dtype=torch.int32), torch.ones(2)])
def test_what_cannot_be_quantized_is_refused(w: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="BF16"):
        fp8_blockwise.quantize(w)
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        fp8_blockwise.quantize_with_amax(torch.ones(10, 4), torch.ones(1, 1), offset=(120, 0))
