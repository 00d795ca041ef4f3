"""The packing kernels on a GPU: the same bytes as torch's copies, and the rates that a refit needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlrefit.integration.packing import ChecksumTable, CopyTable, Strided, checksum
from rlrefit.integration.packing.tables import MagnitudeTable

from .needs import needs

pytestmark = needs()

# Qwen3-30B-A3B's experts: gate and up are [768, 2048], down is [2048, 768].
INTERMEDIATE, HIDDEN, EXPERTS = 768, 2048, 512


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def test_the_kernels_copy_and_add_up_as_torch_does() -> None:
    device = torch.device("cuda", 0)
    weight = torch.randn(INTERMEDIATE, HIDDEN, device=device).to(torch.bfloat16)
    deep = torch.randn(3, 5, 7, 40, 60, device=device)
    views = [
        weight[:, 16:48],
        weight[3:700],
        weight[:, 1:4],
        weight[:, 4:8],
        weight[:, 2:1000],
        weight.t(),
        weight.t()[:, ::3],
        weight.view(torch.uint8)[1:700, 1:808],
        deep[:, :, ::2, 1:3],
        deep[1, 2, 3, 0, 4],
        torch.arange(300_001, device=device)[1:],
    ]
    around = [torch.full([n + 2 for n in v.shape], 9, dtype=v.dtype, device=device) for v in views]
    expected = [t.clone() for t in around]
    inside = [tuple(slice(1, n + 1) for n in v.shape) for v in views]
    for target, place, view in zip(expected, inside, views, strict=True):
        target[place] = view
    targets = [t[place] for t, place in zip(around, inside, strict=True)]
    pairs = [(Strided.of(v), Strided.of(t)) for v, t in zip(views, targets, strict=True)]
    CopyTable.build(pairs, device).launch()
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(around, expected, strict=True))
    offsets, end = [], 0
    for view in views:
        offsets.append(end)
        end += -(-view.nbytes // 16) * 16
    message = torch.zeros(end, dtype=torch.uint8)
    for view, offset in zip(views, offsets, strict=True):
        message[offset : offset + view.nbytes] = flat(view).cpu()
    live = [(Strided.of(view), offset) for view, offset in zip(views, offsets, strict=True)]
    out = torch.ones(2, 2, dtype=torch.int64, device=device)
    ChecksumTable.build(live, device, [1] * len(live)).compute(out)
    assert out.tolist() == [[0, 0], checksum(message).tolist()]


def test_the_largest_magnitudes_are_torchs() -> None:
    device = torch.device("cuda", 0)
    weight = torch.randn(INTERMEDIATE, HIDDEN, device=device)
    bad = weight.clone()
    bad[5, 7] = torch.nan
    views = [
        weight,
        weight.bfloat16(),
        weight.half()[:, 3:],
        weight.t()[::3],
        -weight.abs()[7:9],
        bad.bfloat16(),
    ]
    views.append(torch.full((2, 3), -(2.0**-133), device=device).bfloat16())
    found = MagnitudeTable.build(views, device).compute()
    wanted = torch.stack([view.float().abs().amax() for view in views])
    assert torch.equal(found.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


@pytest.mark.parametrize("cut", ["whole experts", "rows of gate", "columns of down"])
def test_experts_are_packed_and_unpacked_at_70_percent_of_the_devices_copy_rate(cut: str) -> None:
    device = torch.device("cuda", 0)
    storage = torch.zeros(EXPERTS, INTERMEDIATE * HIDDEN, dtype=torch.bfloat16, device=device)
    gate, down = storage.view(-1, INTERMEDIATE, HIDDEN), storage.view(-1, HIDDEN, INTERMEDIATE)
    part = INTERMEDIATE // 4
    views = {
        "whole experts": list(gate),
        "rows of gate": [gate[e, k * part : (k + 1) * part] for e in range(EXPERTS) for k in range(4)],
        "columns of down": [down[e, :, k * part : (k + 1) * part] for e in range(EXPERTS) for k in range(4)],
    }[cut]
    bucket = torch.empty(storage.nbytes, dtype=torch.uint8, device=device)
    pairs, offset = [], bucket.data_ptr()
    for view in views:
        pairs.append((Strided.of(view), Strided.packed(offset, view.shape, 2)))
        offset += view.nbytes
    other = torch.empty_like(storage)
    copy = seconds(lambda: other.copy_(storage))
    pack = seconds(CopyTable.build(pairs, device).launch)
    unpack = seconds(CopyTable.build([(b, a) for a, b in pairs], device).launch)
    assert copy / pack >= 0.7
    assert copy / unpack >= 0.7
