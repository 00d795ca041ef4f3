"""The MXFP8 kernel against the torch form, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlrefit.integration.quantize import mxfp8
from rlrefit.integration.quantize.jobs import QuantizeJob
from rlrefit.integration.quantize.mxfp8 import Rounding
from rlrefit.integration.quantize.mxfp8_table import Mxfp8Table
from tests.ahead import FoundAhead
from tests.triton_interpreter import run_interpreted

from .test_fp8_kernels import hard_weights


def compare_mxfp8_with_torch(device: torch.device) -> None:
    weights = [w[:130, : w.shape[-1] // 32 * 32] for w in hard_weights(device) if w.dim() == 2]
    tiny = weights[0].float() * 2.0**-120
    # Maxima about 448 times a power of two, where the rounding of their share of 448 decides.
    shares = 448.0 * torch.exp2(torch.arange(-130, 110, 16, dtype=torch.float32, device=device))[:, None]
    steps = torch.arange(-2, 3, dtype=torch.int32, device=device)
    near = (shares.view(torch.int32) + steps).view(torch.float32)
    weights += [tiny[:20], near.repeat_interleave(32, dim=1)]
    for rounding, rounded in ((Rounding.UP, False), (Rounding.UP, True), (Rounding.DOWN, False)):
        jobs, found = [], []
        for number, w in enumerate(weights):
            n, k = w.shape
            # Of every third weight all codes, of every third a part, of every third none.
            top, left, bottom, right = [(0, 0, n, k), (5, min(16, k), n - n // 4, k - 16), (0, 0, 0, 0)][
                number % 3
            ]
            room = torch.full((n + 2, k + 32), 0x55, dtype=torch.uint8, device=device)
            codes = room[1 + top : 1 + bottom, 16 + left : 16 + right].view(torch.float8_e4m3fn)
            scales = torch.full((k // 32, n), 0x55, dtype=torch.uint8, device=device).t()
            wants_codes, wants_scales = number % 3 != 2, number % 4 != 1
            jobs.append(
                QuantizeJob(w, codes if wants_codes else None, (top, left), scales if wants_scales else None)
            )
            found.append((room, codes if wants_codes else codes[:0], (top, left, bottom, right), scales))
        table = Mxfp8Table.build(jobs, device, rounding, rounded)
        assert table.nbytes == sum(job.nbytes for job in jobs)
        for sign in (1, -1):  # changed weights before the second launch
            for w in weights:
                w.mul_(sign)
            table.launch()
            for w, job, (room, codes, (top, left, bottom, right), scales) in zip(
                weights, jobs, found, strict=True
            ):
                q, expected = mxfp8.quantize(w.bfloat16() if rounded else w, rounding)
                q = q[top:bottom, left:right] if len(codes) else q[:0, left:right]
                nan = q.float().isnan()
                assert torch.equal(codes.float().isnan(), nan)
                assert torch.equal(codes.view(torch.uint8)[~nan], q.view(torch.uint8)[~nan])
                assert torch.equal(scales, torch.full_like(scales, 0x55) if job.scales is None else expected)
                inside = codes.view(torch.uint8).clone()
                codes.view(torch.uint8).fill_(0x55)
                assert (room == 0x55).all()
                codes.view(torch.uint8).copy_(inside)


def interpret_kernel(folder: Path) -> None:
    run_interpreted(compare_mxfp8_with_torch, torch.device("cpu"))


AHEAD = (interpret_kernel,)


def test_the_kernel_in_tritons_interpreter_gives_torchs_bytes(found_ahead: FoundAhead) -> None:
    found_ahead.by(interpret_kernel)


def test_parts_that_cut_blocks_are_refused() -> None:
    for job in (
        QuantizeJob(torch.ones(2, 48), scales=torch.empty(2, 2, dtype=torch.uint8)),
        QuantizeJob(torch.ones(2, 32), scales=torch.empty(2, 1, dtype=torch.uint8), head=(0, 16)),
    ):
        with pytest.raises(ValueError, match="cuts blocks of 32"):
            Mxfp8Table.build([job], torch.device("cpu"), Rounding.UP)
