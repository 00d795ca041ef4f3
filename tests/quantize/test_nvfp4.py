"""NVFP4 against ModelOpt's formula step by step in FP32, and against vLLM's own functions.

``modelopt_nvfp4.safetensors`` holds what ModelOpt 0.47's ``NVFP4QTensor`` made of some weights, and read of it again.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.nvfp4 import Arithmetic

from .scalars import E2M1, E4M3, nearest
from .weights import cuts, same, weights

ARITHMETICS = st.sampled_from(Arithmetic)
quick = settings(max_examples=60, deadline=None)
rows_of_blocks = st.integers(1, 6).map(lambda n: 16 * n)


@settings(max_examples=15, deadline=None)
@given(weights(st.integers(1, 4), st.just(48), special=False))
def test_weights_are_what_modelopts_formula_gives(w: torch.Tensor) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    packed, scales, scale_2 = nvfp4.quantize(w)
    # vLLM reads the values, and so how codes are packed.
    read = dequantize_to_dtype(packed, scales, scale_2, torch.float32, swizzle=False)
    assert torch.equal(nvfp4.dequantize(packed, scales, scale_2), read)
    codes = nvfp4.unpack(packed)
    amax = np.float32(w.abs().max().item())
    g = np.float32(1) if amax == 0 else max(amax / np.float32(2688), np.float32(2.0**-100))
    assert scale_2.item() == g
    for row, column in product(range(w.shape[0]), range(w.shape[1] // 16)):
        elements = w[row, column * 16 : column * 16 + 16].tolist()
        largest = np.float32(max(map(abs, elements)))
        wanted = np.float32(1) if largest == 0 else largest / (np.float32(6) * g)
        scale = E4M3[max(1, nearest(Fraction(float(wanted)), E4M3))]
        assert scales[row, column].item() == scale
        divisor = np.float32(float(scale)) * g
        for element, code in zip(elements, codes[row, column * 16 : column * 16 + 16].tolist(), strict=True):
            scaled = np.float32(element) / divisor
            assert code & 7 == nearest(Fraction(float(scaled)), E2M1)
            assert code >> 3 == (scaled < 0)


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_and_values_are_those_that_modelopt_itself_made(dtype: str, kind: str) -> None:
    made = load_file(Path(__file__).with_name("modelopt_nvfp4.safetensors"))
    w, packed, scale, scale_2, read = (
        made[f"{dtype}.{kind}.{part}"] for part in ("weight", "packed", "scale", "scale_2", "read")
    )
    ours = nvfp4.quantize(w, None if kind == "own" else scale_2)
    assert torch.equal(ours[0], packed)
    assert same(ours[1], scale)
    assert torch.equal(ours[2], scale_2)
    assert torch.equal(nvfp4.dequantize(*ours), read)


@quick
@given(weights(st.integers(1, 6), rows_of_blocks, special=False), st.sampled_from((1.0, 0.125, 0.7)))
def test_activations_are_what_vllms_reference_gives(x: torch.Tensor, share: float) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    scale_2 = (nvfp4.global_scale(x.abs().max()) * share).clamp(min=nvfp4.LEAST_GLOBAL_SCALE)
    values, expected_scales = ref_nvfp4_quant(x, scale_2.reciprocal(), 16)
    packed, scales, _ = nvfp4.quantize(x, scale_2, Arithmetic.ACTIVATIONS)
    assert torch.equal(scales.float(), expected_scales)
    ones = torch.ones(())
    read = nvfp4.dequantize(packed, torch.ones_like(scales.float()).to(torch.float8_e4m3fn), ones)
    assert torch.equal(read, values)


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_every_tie_and_its_neighbours_get_the_code_of_exact_arithmetic(arithmetic: Arithmetic) -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat((middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9.0))))
    w = torch.full((3, 16), -6.0)  # makes the scale 1
    w[:, :14] = torch.stack((values, -values)).reshape(3, 14)
    packed, scales, _ = nvfp4.quantize(w, torch.ones(()), arithmetic)
    assert scales.float().unique().tolist() == [1.0]
    wanted = [nearest(Fraction(v), E2M1) | (8 if v < 0 else 0) for v in w.flatten().tolist()]
    assert nvfp4.unpack(packed).flatten().tolist() == wanted


@quick
@given(st.data(), weights(st.integers(1, 4), rows_of_blocks), ARITHMETICS)
def test_shards_with_the_shared_global_scale_give_slices_of_the_full_tensor(
    data: st.DataObject, w: torch.Tensor, arithmetic: Arithmetic
) -> None:
    packed, scales, scale_2 = nvfp4.quantize(w, arithmetic=arithmetic)
    pieces = list(product(cuts(data.draw, w.shape[0]), cuts(data.draw, w.shape[1], unit=16)))
    shards = [w[top:bottom, left:right] for (top, bottom), (left, right) in pieces]
    shared = nvfp4.global_scale(*(shard.abs().max() for shard in shards))
    assert same(shared[None], scale_2[None])
    for shard, ((top, bottom), (left, right)) in zip(shards, pieces, strict=True):
        part, part_scales, _ = nvfp4.quantize(shard, shared, arithmetic)
        assert torch.equal(part, packed[top:bottom, left // 2 : right // 2])
        assert same(part_scales, scales[top:bottom, left // 16 : right // 16])


def test_experts_may_have_a_global_scale_each() -> None:
    w = (
        torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    packed, scales, scale_2 = nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2))))
    for expert in range(3):
        for ours, own in zip((packed, scales, scale_2[:, None]), nvfp4.quantize(w[expert]), strict=True):
            assert same(ours[expert], own.reshape(ours[expert].shape))
    back = nvfp4.dequantize(packed, scales, scale_2)
    assert same(back[1], nvfp4.dequantize(packed[1], scales[1], scale_2[1]))


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_a_tensor_of_denormals_becomes_zeros_and_not_the_largest_number(arithmetic: Arithmetic) -> None:
    assert nvfp4.global_scale(torch.tensor(1e-44)).reciprocal().isfinite()
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([2.0**-128, -(2.0**-140), 2.0**-149])
    packed, scales, scale_2 = nvfp4.quantize(x, arithmetic=arithmetic)
    assert scales.float().isfinite().all()
    assert nvfp4.dequantize(packed, scales, scale_2).abs().unique().tolist() == [0.0]


@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_nan_and_with_a_static_scale_its_neighbours_are_not(
    value: float, arithmetic: Arithmetic
) -> None:
    w = torch.ones(2, 32)
    w[1, 20] = value
    back = nvfp4.dequantize(*nvfp4.quantize(w, nvfp4.global_scale(torch.ones(())), arithmetic))
    assert torch.equal(back.isnan(), torch.tensor([[False, False], [False, True]]).repeat_interleave(16, 1))
    assert nvfp4.dequantize(*nvfp4.quantize(w, arithmetic=arithmetic)).isnan()[1, 16:].all()


@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_quantization_is_what_the_engine_reads_and_passes_gradients_through(
    dtype: torch.dtype, arithmetic: Arithmetic
) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    fake = nvfp4.fake_quantize(x, arithmetic=arithmetic)
    assert same(fake.detach(), nvfp4.dequantize(*nvfp4.quantize(x, arithmetic=arithmetic), dtype=dtype))
    gradient = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    fake.backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize(
    ("columns", "scale", "told"),
    [
        (8, None, "multiple of 16"),
        (16, torch.ones(3), r"\(3,\)"),
        (16, torch.ones((), dtype=torch.float64), "FP32"),
    ],
)
def test_what_cannot_be_quantized_is_refused(columns: int, scale: torch.Tensor | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        nvfp4.quantize(torch.ones(2, columns), scale)


def test_whole_numbers_are_refused_by_name_whatever_asks_for_their_codes() -> None:
    for made_by in (nvfp4.quantize, nvfp4.round_trip, nvfp4.fake_quantize):
        with pytest.raises(ValueError, match="int8"):
            made_by(torch.ones(2, 16, dtype=torch.int8))
