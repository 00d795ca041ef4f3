"""MXFP4 against the formula step by step, against bytes of OpenAI's algorithm, and against transformers' reading of them.

``triton_kernels_mxfp4.safetensors`` holds what the operations of ``downcast_to_mxfp_torch`` (triton_kernels at triton 018a674,
``ROUND_UP``) made of some weights.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlrefit.integration.quantize import mxfp4, nvfp4
from rlrefit.integration.quantize.mxfp4_table import Mxfp4Table, PackJob, make_packer
from tests.triton_interpreter import run_interpreted

from .scalars import E2M1, nearest
from .test_nvfp4_kernel import hard_weights
from .weights import same, weights

CPU = torch.device("cpu")


@settings(max_examples=25, deadline=None)
@given(weights(st.integers(1, 4), st.just(64), special=False))
def test_scales_are_the_least_at_which_nothing_saturates_and_codes_the_nearest(w: torch.Tensor) -> None:
    packed, scales = mxfp4.quantize(w)
    codes = nvfp4.unpack(packed)
    for row, column in product(range(w.shape[0]), range(w.shape[1] // 32)):
        elements = w[row, column * 32 : column * 32 + 32].float()
        # What the division by 6 rounds to decides.
        sixth = Fraction((elements.abs().amax() / 6).item())
        byte = int(scales[row, column])
        if not sixth:
            assert byte == 0
        else:
            scale = Fraction(2) ** (byte - 127)
            assert byte >= 1
            assert sixth <= scale
            assert byte == 1 or sixth > scale / 2
        for element, code in zip(elements, codes[row, column * 32 : column * 32 + 32].tolist(), strict=True):
            assert code >> 3 == int(torch.signbit(element))
            if byte:
                assert code & 7 == nearest(abs(Fraction(element.item())) / scale, E2M1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_are_those_of_openais_algorithm_and_transformers_reads_them(dtype: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = load_file(Path(__file__).with_name("triton_kernels_mxfp4.safetensors"))
    w = made[f"{dtype}.weight"]
    packed, scales = mxfp4.quantize(w)
    assert torch.equal(packed, made[f"{dtype}.codes"])
    assert torch.equal(scales, made[f"{dtype}.scales"])
    whole = (scales > 0) & (scales < 250)  # transformers reads zeros and the largest by other arithmetic
    blocks = packed.view(1, *scales.shape, 16)
    read = convert_moe_packed_tensors(blocks, scales[None]).transpose(1, 2)[0]
    ours = mxfp4.dequantize(packed, scales)
    kept = whole.repeat_interleave(32, 1)
    assert torch.equal(ours[kept], read[kept])


def test_a_block_with_a_nan_or_an_infinity_is_nan_as_a_whole() -> None:
    w = torch.ones(3, 96)
    w[0, 3], w[1, 40], w[2, 95] = torch.nan, torch.inf, -torch.inf
    packed, scales = mxfp4.quantize(w)
    assert (scales == mxfp4.NAN_SCALE).nonzero().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert mxfp4.dequantize(packed, scales).isnan().sum() == 3 * 32


@pytest.mark.parametrize("shape", [(4, 16), (4, 40)])
def test_rows_that_cut_blocks_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.quantize(torch.ones(shape))


def _blocks_of_32(w: torch.Tensor) -> torch.Tensor:
    return w[:, : w.shape[1] // 32 * 32]


def compare_kernel_with_torch(dtype: torch.dtype, device: torch.device = CPU) -> None:
    found = [_blocks_of_32(w) for w in hard_weights() if dtype in (torch.bfloat16, w.dtype)]
    # Columns that are contiguous, as transformers keeps experts.
    found += [w.t().contiguous().t() for w in found[:4]]
    found = [w if device == CPU else w.to(device) for w in found]
    jobs = [
        PackJob(
            w,
            torch.full((w.shape[0], w.shape[1] // 2), 0xAA, dtype=torch.uint8, device=device),
            torch.full((w.shape[0], w.shape[1] // 32), 0x55, dtype=torch.uint8, device=device),
        )
        for w in found
    ]
    packer = make_packer(jobs, dtype, device, interpret=device == CPU)
    assert isinstance(packer, Mxfp4Table)
    packer.launch()
    for index, (w, job) in enumerate(zip(found, jobs, strict=True)):
        codes, scales = mxfp4.quantize(w.to(dtype))
        assert same(job.codes, codes), index
        assert same(job.scales, scales), index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gives_the_bytes_of_torch(dtype: torch.dtype) -> None:
    run_interpreted(compare_kernel_with_torch, dtype)
