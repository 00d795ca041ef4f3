"""Quantized bytes on a GPU: those of the CPU, and the FP8 kernel's those of torch."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.quantize import blocks, e8m0, fp8_blockwise, int4, mxfp8, nvfp4
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Int4, Mxfp8, Nvfp4
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from rlrefit.workers.trainers.qat.config import NVFP4
from rlrefit.workers.trainers.qat.functions import linear
from tests.qat.test_functions import of_stack
from tests.quantize.test_fp8_kernels import (
    compare_cut_blocks_with_torch,
    compare_kernel_with_torch,
    hard_weights,
)
from tests.quantize.test_int4 import compare_int4_with_torch
from tests.quantize.test_int4 import compare_round_trips_with_torch as compare_int4_round_trips
from tests.quantize.test_mxfp4 import compare_kernel_with_torch as compare_mxfp4_with_torch
from tests.quantize.test_mxfp8_kernel import compare_mxfp8_with_torch
from tests.quantize.test_nvfp4_kernel import compare_kernel_with_torch as compare_nvfp4_with_torch
from tests.quantize.test_nvfp4_kernel import compare_round_trips_with_torch as compare_nvfp4_round_trips
from tests.quantize.test_scale_watch import look_at_one_after_the_other
from tests.quantize.weights import same

from .needs import needs

pytestmark = needs()


def test_every_format_has_the_bytes_that_it_has_on_the_cpu() -> None:
    gpu = torch.device("cuda", 0)
    for w in hard_weights(torch.device("cpu")):
        w = w.contiguous()
        whole = w[..., : w.shape[-1] // 32 * 32]
        for here, there, on in ((w, w.to(gpu), fp8_blockwise), (whole, whole.to(gpu), mxfp8)):
            options = ScaleFormat if on is fp8_blockwise else mxfp8.Rounding
            for option in options:
                name = "scale" if on is fp8_blockwise else "rounding"
                for a, b in zip(
                    on.quantize(here, **{name: option}), on.quantize(there, **{name: option}), strict=True
                ):
                    assert same(a, b.cpu())
        for a, b in zip(int4.quantize(whole, 32), int4.quantize(whole.to(gpu), 32), strict=True):
            assert same(a, b.cpu())
        for arithmetic in nvfp4.Arithmetic:
            ours = nvfp4.quantize(whole, arithmetic=arithmetic)
            theirs = nvfp4.quantize(whole.to(gpu), arithmetic=arithmetic)
            for a, b in zip(ours, theirs, strict=True):
                assert same(a[None], b.cpu()[None])
            assert same(nvfp4.dequantize(*ours), nvfp4.dequantize(*theirs).cpu())


def test_packed_scales_are_those_of_the_cpu() -> None:
    _, scales = fp8_blockwise.quantize(torch.randn(1000, 700), scale=ScaleFormat.UE8M0)
    rows = e8m0.rows_of_blocks(scales, 1000)
    there = e8m0.packed_ue8m0(e8m0.rows_of_blocks(scales.cuda(), 1000))
    here = e8m0.packed_ue8m0(rows)
    assert torch.equal(there.cpu(), here)
    assert there.stride() == here.stride()
    assert torch.equal(e8m0.to_e8m0(rows.cuda()).cpu(), e8m0.to_e8m0(rows))


def test_the_mxfp4_kernel_gives_torchs_bytes() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        compare_mxfp4_with_torch(dtype, torch.device("cuda", 0))


def test_the_kernel_gives_torchs_bytes() -> None:
    compare_kernel_with_torch(torch.device("cuda", 0))
    compare_cut_blocks_with_torch(torch.device("cuda", 0))
    compare_mxfp8_with_torch(torch.device("cuda", 0))


def test_the_int4_kernel_gives_torchs_bytes() -> None:
    compare_int4_with_torch(torch.device("cuda", 0))


def test_the_nvfp4_kernel_gives_torchs_bytes() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        compare_nvfp4_with_torch(dtype, torch.device("cuda", 0))


def test_what_kernels_put_in_place_of_numbers_is_what_codes_and_scales_stand_for() -> None:
    compare_nvfp4_round_trips(torch.device("cuda", 0))
    compare_int4_round_trips(torch.device("cuda", 0))


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("format", [NVFP4, Int4(32)], ids=["NVFP4", "INT4"])
def test_a_compiled_layer_computes_what_it_does_uncompiled(format: Nvfp4 | Int4, inputs: bool) -> None:
    x, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (64, 128))
    of_weight, of_inputs = (nvfp4.global_scale(blocks.largest_magnitude(part) * 0.5) for part in (weight, x))
    scales = of_weight if isinstance(format, Nvfp4) else None, of_inputs if inputs else None

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, *scales, format)

    found = []
    for run in (layer, torch.compile(layer)):
        given = [part.clone().requires_grad_() for part in (x, weight)]
        out = run(*given)
        out.float().square().sum().backward()
        found.append([out.detach(), *(part.grad for part in given)])
    for uncompiled, compiled in zip(*found, strict=True):
        assert uncompiled is not None
        assert compiled is not None
        assert torch.equal(uncompiled, compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_experts_computes_in_one_what_its_experts_do_one_after_another(dtype: torch.dtype) -> None:
    for ours, theirs in of_stack(dtype, torch.device("cuda", 0)):
        # Products add up in another order.
        torch.testing.assert_close(ours, theirs)


def test_the_largest_magnitude_is_no_number_where_an_element_is_none() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(1000, 64, device="cuda").to(dtype)
        assert blocks.largest_magnitude(x) == x.abs().amax()
        x[700, 3] = -torch.inf
        assert blocks.largest_magnitude(x) == torch.inf
        x[10, 5] = torch.nan
        assert blocks.largest_magnitude(x).isnan()


@pytest.mark.parametrize("format", [Mxfp8(), Fp8Blockwise()], ids=["MXFP8", "FP8 blocks"])
def test_scales_that_are_no_numbers_are_found_as_on_the_cpu(
    format: Format,
) -> None:
    look_at_one_after_the_other(format, torch.device("cuda", 0))
