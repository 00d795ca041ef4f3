"""The NVFP4 kernel against the torch form, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import torch

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.four_bits import DevicePacker, PackJob, make_packer
from rlrefit.integration.quantize.nvfp4_table import NVFP4
from tests.triton_interpreter import run_interpreted

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


def compare_kernel_with_torch(dtype: torch.dtype, device: torch.device = CPU) -> None:
    weights = [w.to(device) for w in hard_weights() if dtype in (torch.bfloat16, w.dtype)]
    jobs = [
        PackJob(
            w,
            torch.full((w.shape[0], w.shape[1] // 2), 0xAA, dtype=torch.uint8, device=device),
            torch.full((w.shape[0], w.shape[1] // 16), 0x55, dtype=torch.uint8, device=device).view(
                torch.float8_e4m3fn
            ),
        )
        for w in weights
    ]
    packer = make_packer(NVFP4, jobs, dtype, device, interpret=device.type == "cpu")
    assert isinstance(packer, DevicePacker)
    # On a GPU within and beyond what it divides by reciprocals.
    for factor in (1.0, 3.0, 2.0**-40) if device.type == "cpu" else (1.0, 3.0, 2.0**-40, 2.0**-95, 2.0**8):
        scales = []
        for w in weights:
            amax = w.to(dtype).nan_to_num(0.0, 0.0, 0.0).abs().amax() if w.numel() else torch.zeros(())
            scales.append(nvfp4.global_scale(amax) * factor)
        scales[len(scales) // 2] = torch.tensor(1.0)
        scale_2 = torch.stack([scale.to(device) for scale in scales]).clamp(min=nvfp4.LEAST_GLOBAL_SCALE)
        packer.launch(scale_2)
        for index, (w, job) in enumerate(zip(weights, jobs, strict=True)):
            codes, block_scales, _ = nvfp4.quantize(w.to(dtype), scale_2[index])
            assert torch.equal(job.codes, codes), (index, factor)
            assert torch.equal(job.scales.view(torch.uint8), block_scales.view(torch.uint8)), (index, factor)


def test_the_kernel_gives_the_bytes_of_torch_for_weights_that_are_rounded_first() -> None:
    run_interpreted(compare_kernel_with_torch, torch.bfloat16)


def test_the_kernel_gives_the_bytes_of_torch_for_weights_as_they_are_kept() -> None:
    run_interpreted(compare_kernel_with_torch, torch.float32)
