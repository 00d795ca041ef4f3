"""The FP8 kernel against the torch form, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from rlrefit.integration.quantize.fp8_table import Fp8Table, Quantization

NAN, INF = float("nan"), float("inf")


def hard_weights(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(200, 300, generator=generator) * torch.exp2(
        torch.randint(-18, 6, (200, 300), generator=generator).float()
    )
    special = base.clone()
    special[3, 5], special[150, 2], special[150, 290] = NAN, INF, -INF
    special[:100, 140:] = 0.0
    special[5, 140:] = -0.0
    # Every E4M3 tie and its neighbours, beside a maximum of 448 that makes the scale 1.
    ties = torch.arange(0, 0x43E00000, 1 << 19, dtype=torch.int32)[-2000:]
    ties = torch.stack((ties - 1, ties, ties + 1)).view(torch.float32).reshape(-1)
    edges = torch.zeros(128, 128)
    edges.view(-1)[: len(ties)] = ties
    edges[-1, -1] = -448.0
    return [
        w.to(device)
        for w in (
            base.bfloat16(),
            special.bfloat16(),
            special,
            edges,
            base.half()[3:190, 1:299],
            base.bfloat16().t(),
            base.bfloat16()[:, 16:272],  # rows of 16-element units
            torch.stack((base, special))[:, 1:, :160],
            torch.randn(2, 2, 130, 10, generator=generator).bfloat16()[:, :, :, ::3],
            torch.empty(0, 128).bfloat16(),
        )
    ]


def compare_kernel_with_torch(device: torch.device) -> None:
    weights = hard_weights(device)
    for scale in ScaleFormat:
        items, bytes_, scales_ = [], [], []
        for w in weights:
            *leading, n, k = w.shape
            left = 16 if k % 16 == 0 else 2
            room = torch.full((*leading, n + 2, left + k + left), 0x55, dtype=torch.uint8, device=device)
            scales = torch.full((*leading, -(-k // 128), -(-n // 128)), NAN, device=device).transpose(-1, -2)
            codes = room[..., 1 : n + 1, left : left + k].view(torch.float8_e4m3fn)
            items.append(Quantization(w, codes, scales))
            bytes_.append((room, left))
            scales_.append(scales)
        table = Fp8Table.build(items, device, scale)
        for sign in (1, -1):  # changed weights before the second launch
            for w in weights:
                w.mul_(sign)
            table.launch()
            for w, (room, left), scales in zip(weights, bytes_, scales_, strict=True):
                n, k = w.shape[-2:]
                q, expected_scales = fp8_blockwise.quantize(w, scale=scale)
                got = room[..., 1 : n + 1, left : left + k]
                nan = q.float().isnan()
                assert torch.equal(got.view(torch.float8_e4m3fn).float().isnan(), nan)
                assert torch.equal(got[~nan], q.view(torch.uint8)[~nan])
                torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
                outside = room.clone()
                outside[..., 1 : n + 1, left : left + k] = 0x55
                assert (outside == 0x55).all()


def test_the_kernel_in_tritons_interpreter_gives_torchs_bytes() -> None:
    code = (
        "import torch; from tests.quantize.test_fp8_kernels import compare_kernel_with_torch as c; "
        "c(torch.device('cpu'))"
    )
    # A process of its own, since Triton decides when a kernel is defined whether to interpret it.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_results_that_do_not_fit_their_weight_are_refused() -> None:
    cpu = torch.device("cpu")
    w, codes = torch.ones(130, 4), torch.empty(130, 4, dtype=torch.float8_e4m3fn)
    for item, message in (
        (Quantization(w, codes[:4], torch.ones(2, 1)), r"the codes of a weight of shape \(130, 4\) are"),
        (Quantization(w, codes, torch.ones(1, 1)), r"are torch.float32 of shape \(2, 1\), not .* \(1, 1\)"),
        (Quantization(w, codes, torch.ones(1, 1).expand(2, 1)), "share one place"),
        (
            Quantization(w, codes, torch.ones(2, 1, device="meta")),
            "the scales are on meta and the weight on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Fp8Table.build([item], cpu)
