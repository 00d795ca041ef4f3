"""The NVFP4 kernel against the torch form, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.jobs import GlobalScale, QuantizeJob
from rlrefit.integration.quantize.nvfp4 import Arithmetic
from rlrefit.integration.quantize.nvfp4_table import Nvfp4Table
from tests.triton_interpreter import run_interpreted

from .weights import same

CPU = torch.device("cpu")


def hard_weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 208, generator=generator)
    base *= torch.exp2(torch.randint(-18, 6, (40, 13), generator=generator).float()).repeat_interleave(16, 1)
    special = base.clone()
    special[3, 5], special[30, 2], special[31, 40] = torch.nan, torch.inf, -torch.inf
    special[:20, 144:] = 0.0
    special[5, 144:] = -0.0
    # E2M1's ties and their neighbours, by a scale of 1.
    steps = torch.arange(-32, 33).repeat(13)[: 52 * 16].view(52, 16) / 8
    ties = torch.cat(
        [steps, steps.nextafter(torch.tensor(torch.inf)), steps.nextafter(torch.tensor(-torch.inf))]
    )
    ties[:, 0] = 6.0
    tiny = base * 2.0**-120
    # Within a few roundings of the bounds between codes, by many scales.
    scale = (torch.rand(64, 1, generator=generator) + 1).to(torch.float8_e4m3fn).float()
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat_interleave(2).repeat(64, 1)
    near = (bounds * scale).view(torch.int32) + torch.randint(
        -2, 3, (64, 14), dtype=torch.int32, generator=generator
    )
    near = torch.cat([scale * 6, near.view(torch.float32), -scale], dim=1)
    return [
        base,
        base.bfloat16(),
        base.half(),
        special,
        special.bfloat16(),
        ties,
        tiny,
        base.bfloat16()[3:, 16:176],
        base.bfloat16()[:, :32].t().contiguous().t(),
        base[:, :48].reshape(20, 96)[:, :80],
        near,
        near.bfloat16(),
        torch.empty(0, 32),
    ]


def _wanted(number: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Rows and columns of the codes that are wanted, all or a part that cuts blocks."""
    if number % 3 or not height:
        return 0, 0, height, width // 2
    return height // 4, 3, height, width // 2 - 1


def compare_kernel_with_torch(dtype: torch.dtype, device: torch.device = CPU) -> None:
    weights = [w.to(device) for w in hard_weights() if dtype in (torch.bfloat16, w.dtype)]
    jobs: list[QuantizeJob] = []
    targets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for number, w in enumerate(weights):
        height, width = w.shape
        top, left, bottom, right = _wanted(number, height, width)
        # Of every second weight as it lies in a matrix of more columns, of the others without gaps.
        gap = 16 * (number % 2)
        room = torch.full((height, width // 2 + gap), 0xAA, dtype=torch.uint8, device=device)
        codes = room[top:bottom, left:right]
        scales = torch.full((height, width // 16 + gap), 0x55, dtype=torch.uint8, device=device)
        scales = scales[:, : width // 16].view(torch.float8_e4m3fn)
        if number % 4 == 3:
            scales = scales.t().contiguous().t()
        targets.append((room, codes, scales))
        jobs.append(
            QuantizeJob(
                w,
                None if number % 5 == 4 else codes,
                (top, left),
                None if number % 7 == 6 else scales,
                # Of one in three nobody asks what is largest.
                global_scale=GlobalScale(
                    torch.empty((), dtype=torch.float32, device=device),
                    torch.empty((), dtype=torch.int32, device=device) if number % 3 else None,
                ),
            )
        )
    table = Nvfp4Table.build(jobs, device, dtype == torch.bfloat16)
    assert table.nbytes == sum(job.nbytes for job in jobs)
    # On a GPU within and beyond what it divides by reciprocals.
    for factor in (1.0, 3.0, 2.0**-40) if device.type == "cpu" else (1.0, 3.0, 2.0**-40, 2.0**-95, 2.0**8):
        for number, (w, job) in enumerate(zip(weights, jobs, strict=True)):
            amax = w.to(dtype).nan_to_num(0.0, 0.0, 0.0).abs().amax() if w.numel() else torch.zeros(())
            scale = nvfp4.global_scale(amax) * factor
            if number == len(weights) // 2:
                scale = torch.tensor(1.0)
            assert job.global_scale is not None
            job.global_scale.value.copy_(scale.clamp(min=nvfp4.LEAST_GLOBAL_SCALE))
            if job.global_scale.found is not None:
                job.global_scale.found.zero_()
        for room, _, scales in targets:
            room.fill_(0xAA)
            scales.view(torch.uint8).fill_(0x55)
        table.launch()
        for number, (w, job, (room, _, scales)) in enumerate(zip(weights, jobs, targets, strict=True)):
            assert job.global_scale is not None
            packed, made, _ = nvfp4.quantize(w.to(dtype), job.global_scale.value)
            if (found := job.global_scale.found) is not None:
                largest = w.to(dtype).abs().amax().float() if w.numel() else torch.zeros((), device=device)
                assert torch.equal(found.view(torch.float32).nan_to_num(-1.0), largest.nan_to_num(-1.0)), (
                    number
                )
            top, left, bottom, right = _wanted(number, *w.shape)
            expected = torch.full_like(room, 0xAA)
            if job.codes is not None:
                expected[top:bottom, left:right] = packed[top:bottom, left:right]
            assert torch.equal(room, expected), (number, factor)
            if job.scales is None:
                made = torch.full_like(scales.view(torch.uint8), 0x55).view(made.dtype)
            assert torch.equal(scales.view(torch.uint8), made.view(torch.uint8)), (number, factor)


def compare_round_trips_with_torch(device: torch.device) -> None:
    from rlrefit.integration.quantize.nvfp4_kernels import round_trip

    factors = [1.0, 0.3, 2.0**-40, torch.nan, torch.inf]
    if device.type != "cpu":
        factors += [2.0**-95, 2.0**8]  # beyond what it divides by reciprocals
    whole = [w for w in hard_weights() if w.numel()]
    stack = torch.stack([whole[0], whole[0] * 2.0**-12, whole[0] * 3]).bfloat16()
    for w in [*whole, stack]:
        leading = w.shape[: w.dim() - 2]
        finite = w.float().nan_to_num(0.0, 0.0, 0.0).flatten(len(leading))
        amax = torch.linalg.vector_norm(finite, torch.inf, dim=-1)
        for factor in factors:
            scale = (nvfp4.global_scale(amax) * factor).clamp(min=nvfp4.LEAST_GLOBAL_SCALE)
            for arithmetic in Arithmetic:
                expected = nvfp4.dequantize(*nvfp4.quantize(w, scale, arithmetic), w.dtype)
                inside = None
                if arithmetic is Arithmetic.ACTIVATIONS:
                    # The opposite of what is right.
                    inside = ~nvfp4.in_range(w, scale).contiguous().to(device)
                found = round_trip(w.to(device), scale.to(device), arithmetic, inside)
                assert same(found.cpu(), expected), (w.dtype, w.shape, factor, arithmetic)
                if inside is not None:
                    assert torch.equal(inside.cpu(), nvfp4.in_range(w, scale))


def test_what_the_kernel_puts_in_place_of_numbers_is_what_their_codes_and_scales_stand_for() -> None:
    run_interpreted(compare_round_trips_with_torch, CPU)


def test_the_kernel_gives_the_bytes_of_torch_for_weights_that_are_rounded_first() -> None:
    run_interpreted(compare_kernel_with_torch, torch.bfloat16)


def test_the_kernel_gives_the_bytes_of_torch_for_weights_as_they_are_kept() -> None:
    run_interpreted(compare_kernel_with_torch, torch.float32)


def test_parts_that_cut_blocks_or_lack_a_global_scale_are_refused() -> None:
    scale = GlobalScale(torch.ones(()))
    codes = torch.empty(2, 16, dtype=torch.uint8)
    for job, what in (
        (QuantizeJob(torch.ones(2, 40), codes, global_scale=scale), "cuts blocks of 16"),
        (QuantizeJob(torch.ones(2, 32), codes, head=(0, 8), global_scale=scale), "cuts blocks of 16"),
        (QuantizeJob(torch.ones(2, 32), codes, (0, 1), global_scale=scale), "do not lie inside"),
        (QuantizeJob(torch.ones(2, 32), codes), "no global scale"),
    ):
        with pytest.raises(ValueError, match=what):
            Nvfp4Table.build([job], CPU)
