"""The FP8 kernel against the torch form, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from rlrefit.integration.packing import Strided
from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from rlrefit.integration.quantize.fp8_table import Fp8Table
from rlrefit.integration.quantize.jobs import QuantizeJob
from tests.ahead import FoundAhead
from tests.triton_interpreter import run_interpreted

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
    weights = [
        weight[index] for weight in hard_weights(device) for index in product(*map(range, weight.shape[:-2]))
    ]
    weights += [w.t() for w in weights[5:6]] + [weights[2][:, 16:272]]
    for scale, rounded in ((ScaleFormat.FP32, False), (ScaleFormat.UE8M0, False), (ScaleFormat.FP32, True)):
        jobs, bytes_, scales_ = [], [], []
        for number, w in enumerate(weights):
            n, k = w.shape
            # Of every third weight all codes, of every third a part, of every third none.
            top, left, bottom, right = [
                (0, 0, n, k),
                (5, min(16, k), n - n // 4, max(k - 32, min(16, k))),
                (0, 0, 0, 0),
            ][number % 3]
            margin = 16 if k % 16 == 0 else 2
            room = torch.full((n + 2, margin + k + margin), 0x55, dtype=torch.uint8, device=device)
            codes = room[1 + top : 1 + bottom, margin + left : margin + right].view(torch.float8_e4m3fn)
            scales = torch.full((-(-k // 128), -(-n // 128)), NAN, device=device).t()
            wants_codes, wants_scales = number % 3 != 2, number % 4 != 1
            jobs.append(
                QuantizeJob(w, codes if wants_codes else None, (top, left), scales if wants_scales else None)
            )
            bytes_.append((room, codes if wants_codes else codes[:0], (top, left, bottom, right)))
            scales_.append(scales if wants_scales else None)
        table = Fp8Table.build(jobs, device, scale, rounded)
        for sign in (1, -1):  # changed weights before the second launch
            for w in weights:
                w.mul_(sign)
            table.launch()
            for w, (room, codes, (top, left, bottom, right)), scales in zip(
                weights, bytes_, scales_, strict=True
            ):
                q, expected_scales = fp8_blockwise.quantize(w.bfloat16() if rounded else w, scale=scale)
                q = q[top:bottom, left:right] if len(codes) else q[:0, left:right]
                nan = q.float().isnan()
                assert torch.equal(codes.float().isnan(), nan)
                assert torch.equal(codes.view(torch.uint8)[~nan], q.view(torch.uint8)[~nan])
                if scales is not None:
                    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
                inside = codes.view(torch.uint8).clone()
                codes.view(torch.uint8).fill_(0x55)
                assert (room == 0x55).all()
                codes.view(torch.uint8).copy_(inside)


def compare_cut_blocks_with_torch(device: torch.device) -> None:
    """Parts that begin anywhere in their blocks: the scales that they would have, and codes by given ones."""
    heads = [(0, 0), (64, 16), (127, 0), (5, 3)]
    for scale, rounded in ((ScaleFormat.FP32, True), (ScaleFormat.UE8M0, False)):
        weights = [w.clone() for w in hard_weights(device) if w.dim() == 2 and w.numel()]
        made, codes, given = [], [], []
        for number, w in enumerate(weights):
            head = heads[number % len(heads)]
            down, over = (-(-(n + h) // 128) for n, h in zip(w.shape, head, strict=True))
            own = torch.full((over, down), NAN, device=device).t()
            others = torch.full((down, over), NAN, device=device)
            out = torch.full((w.shape[0], w.shape[1] + 16), 0x55, dtype=torch.uint8, device=device)
            made.append(QuantizeJob(w, scales=own, head=head))
            part = out[:, : w.shape[1]].view(torch.float8_e4m3fn)
            given.append(QuantizeJob(w, part, scales=others, head=head))
            codes.append(out)
        tables = [Fp8Table.build(jobs, device, scale, rounded) for jobs in (made, given)]
        assert [table.nbytes for table in tables] == [
            sum(w.scales.nbytes for w in made),
            sum(w.numel() for w in weights),
        ]
        for sign in (1, -1):  # changed weights before the second launch
            for w in weights:
                w.mul_(sign)
            for number, table in enumerate(tables):
                table.launch()
                if not number:
                    for one, job in zip(given, made, strict=True):
                        # As if others held larger parts of some blocks.
                        one.scales.copy_(job.scales)
                        one.scales[::2] *= 4.0 - sign
            for w, own, one, out in zip(weights, made, given, codes, strict=True):
                kept = w.bfloat16() if rounded else w
                amax = fp8_blockwise.block_amax(kept, own.head)
                expected = fp8_blockwise.scales_of(amax, scale)
                torch.testing.assert_close(own.scales, expected, rtol=0, atol=0, equal_nan=True)
                q = fp8_blockwise.codes_of(kept, one.scales, own.head)
                nan = q.float().isnan()
                found = out[:, : w.shape[1]]
                assert torch.equal(found.contiguous().view(torch.float8_e4m3fn).float().isnan(), nan)
                assert torch.equal(found[~nan], q.view(torch.uint8)[~nan])
                assert (out[:, w.shape[1] :] == 0x55).all()
                out.fill_(0x55)


def interpret_kernel(folder: Path) -> None:
    run_interpreted(compare_kernel_with_torch, torch.device("cpu"))


def interpret_cut_blocks(folder: Path) -> None:
    run_interpreted(compare_cut_blocks_with_torch, torch.device("cpu"))


AHEAD = (interpret_kernel, interpret_cut_blocks)


@pytest.mark.parametrize("interpret", AHEAD)
def test_the_kernel_in_tritons_interpreter_gives_torchs_bytes(
    interpret: Callable[[Path], None], found_ahead: FoundAhead
) -> None:
    found_ahead.by(interpret)


WEIGHT, CODES = torch.ones(130, 4), torch.empty(130, 4, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (QuantizeJob(WEIGHT, CODES, (1, 0), torch.ones(2, 1)), "inside a weight"),
        (QuantizeJob(WEIGHT, CODES, (0, 0), torch.ones(1, 1)), r"\(2, 1\), not \(1, 1\)"),
        (QuantizeJob(WEIGHT, CODES, (0, 0), torch.ones(1, 1).expand(2, 1)), "share one place"),
        (QuantizeJob(WEIGHT, CODES[1:], (0, 0), torch.ones(2, 1), (1, 0)), "as a whole"),
        (QuantizeJob(WEIGHT, None, (0, 0), torch.ones(2, 1), (127, 0)), r"\(3, 1\), not \(2, 1\)"),
        (QuantizeJob(WEIGHT, CODES.bfloat16()), "bfloat16"),
        (QuantizeJob(WEIGHT, None, (0, 0), Strided(64, (2, 1), (8, 8), 8)), "items of 4 bytes"),
    ],
)
def test_results_that_do_not_fit_their_weight_are_refused(job: QuantizeJob, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Fp8Table.build([job], torch.device("cpu"))
