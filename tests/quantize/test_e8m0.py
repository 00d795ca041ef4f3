"""Scales of one byte, and DeepGEMM's form of them against loops over its addresses."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.quantize import e8m0, fp8_blockwise
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat

quick = settings(max_examples=40, deadline=None)
shapes = st.lists(st.integers(1, 3), max_size=1).flatmap(
    lambda leading: st.tuples(*map(st.just, leading), st.integers(1, 300), st.integers(1, 11))
)


def test_every_e8m0_byte_survives_and_means_its_power() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    scales = e8m0.from_e8m0(every)
    assert scales[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert scales[255].isnan()
    assert torch.equal(e8m0.to_e8m0(scales), every)
    assert e8m0.to_e8m0(torch.tensor([torch.inf])).item() == 255


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0, 2.0**-128, 1.0 + 2**-23])
def test_scales_that_e8m0_does_not_have_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="1 of 2 scales"):
        e8m0.to_e8m0(torch.tensor([1.0, value]))


@quick
@given(shapes)
def test_packed_scales_have_each_byte_where_deepgemm_looks_for_it(shape: tuple[int, ...]) -> None:
    byte = torch.randint(0, 254, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = e8m0.packed_ue8m0(e8m0.from_e8m0(byte))
    *leading, mn, k = shape
    pitch = (mn + 3) // 4 * 4
    assert packed.shape == (*leading, mn, (k + 3) // 4)
    assert packed.stride()[-2:] == (1, pitch)
    memory = (
        torch.as_strided(packed, (packed.untyped_storage().nbytes() // 4,), (1,)).view(torch.uint8).tolist()
    )
    flat = byte.reshape(-1, mn, k)
    for batch, row, column in product(range(flat.shape[0]), range(0, mn, 7), range((k + 3) // 4 * 4)):
        at = ((batch * ((k + 3) // 4) + column // 4) * pitch + row) * 4 + column % 4
        assert memory[at] == (flat[batch, row, column] if column < k else 0)
    raw = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    assert torch.equal(raw[..., :k], byte)


def test_deepgemms_weights_on_blackwell_have_a_packed_scale_for_each_row() -> None:
    w = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, scales = fp8_blockwise.quantize(w, scale=ScaleFormat.UE8M0)
    packed = e8m0.packed_ue8m0(e8m0.rows_of_blocks(scales, 300))
    assert packed.shape == (300, 2)
    for row, column in product((0, 127, 128, 299), range(6)):
        exponent = (packed[row, column // 4].item() >> (8 * (column % 4))) & 255
        assert 2.0 ** (exponent - 127) == scales[row // 128, column]
    with pytest.raises(ValueError, match="400 rows"):
        e8m0.rows_of_blocks(scales, 400)
    with pytest.raises(ValueError, match="FP32"):
        e8m0.packed_ue8m0(scales.bfloat16())
