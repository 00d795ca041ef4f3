"""The Triton kernels without a GPU: Triton's interpreter runs them on the addresses of CPU tensors."""

from __future__ import annotations

from typing import Any

from tests.triton_interpreter import run_interpreted


def compare_kernels_with_torch() -> None:
    """Runs in a process of its own, which loads the kernels."""
    import torch

    from rlrefit.integration.packing import (
        CastTable,
        ChecksumTable,
        CopyTable,
        Strided,
        checksum,
        tables,
    )

    cpu = torch.device("cpu")
    weight = torch.randn(96, 64).to(torch.bfloat16)
    deep = torch.randn(3, 5, 7, 4, 6)
    views = [
        weight[:, 16:48],  # a column slice: rows of 16-byte units
        weight[3:90],  # contiguous, more than one tile
        weight[:, 1:4],  # odd columns: 2-byte units
        weight.t(),  # rows within an outer dimension
        weight.view(torch.uint8)[1:7, 1:8],
        deep[:, :, ::2, 1:3],  # more dimensions than a row has
        deep[1, 2, 3, 0, 4],
        torch.arange(3001, dtype=torch.int64)[1:],
    ]

    def framed(
        held: list[torch.Tensor], kind: torch.dtype | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Storages with a margin around the views' shapes, the places inside, and what the storages have to hold."""
        storages = [torch.full([n + 2 for n in v.shape], 9, dtype=kind or v.dtype) for v in held]
        middle = [tuple(slice(1, n + 1) for n in v.shape) for v in held]
        wanted = [t.clone() for t in storages]
        for w, v, at in zip(wanted, held, middle, strict=True):
            w[at] = v.to(w.dtype)
        return storages, [Strided.of(t[at]) for t, at in zip(storages, middle, strict=True)], wanted

    storages, places, wanted = framed(views)
    CopyTable.build(list(zip(map(Strided.of, views), places, strict=True)), cpu).launch()
    assert all(map(torch.equal, storages, wanted))
    for source, kind in (
        (deep.contiguous(), torch.bfloat16),
        (weight.float() * 1e-3, torch.float16),
        (weight, torch.float32),
    ):
        held = [source, source[1:], source[..., 1:4], source.mT, source[..., 0]]
        storages, places, wanted = framed(held, kind)
        table = CastTable.build(zip(map(Strided.of, held), places, strict=True), source.dtype, kind, cpu)
        assert table.nbytes == sum(v.numel() for v in held) * kind.itemsize
        table.launch()
        assert all(map(torch.equal, storages, wanted))
    offsets, end = [], 0
    for v in views:
        offsets.append(end)
        end += -(-v.nbytes // 16) * 16
    message = torch.zeros(end, dtype=torch.uint8)
    for v, offset in zip(views, offsets, strict=True):
        message[offset : offset + v.nbytes] = v.contiguous().reshape(-1).view(torch.uint8)
    out = torch.full((2, 2), 5, dtype=torch.int64)
    live = [(Strided.of(v), offset) for v, offset in zip(views, offsets, strict=True)]
    ChecksumTable.build(live, cpu, [1] * len(live)).compute(out)
    assert out.tolist() == [[0, 0], checksum(message).tolist()]
    bad = deep.clone()
    bad[1, 2, 3, 0, 4] = torch.nan
    held = [weight, weight[:, 1:4], weight.t()[::3], deep[:, :, ::2, 1:3], deep.half(), -deep.abs(), bad]
    held += [torch.tensor([[1.0, -torch.inf]]), torch.full((2, 3), -(2.0**-133)).bfloat16(), torch.zeros(5)]
    largest = torch.stack([torch.linalg.vector_norm(v.float(), torch.inf) for v in held])
    tables._MAGNITUDE_PROGRAMS = 2  # so that each makes several tiles
    found = tables.MagnitudeTable.build(held, cpu).compute()
    assert torch.equal(found.nan_to_num(nan=-1.0), largest.nan_to_num(nan=-1.0))
    codes = [
        torch.arange(600, dtype=torch.int16).to(torch.uint8).view(20, 30),
        torch.zeros(7, dtype=torch.uint8),
    ]
    codes += [codes[0][3:6, ::2], codes[0][1:2, 5:6]]
    assert torch.equal(
        tables.MagnitudeTable.build(codes, cpu).compute(), torch.stack([c.amax() for c in codes]).float()
    )


def test_the_kernels_copy_and_add_up_as_torch_does() -> None:
    run_interpreted(compare_kernels_with_torch)
