"""INT4 codes and 16-bit scales put in the orders of vLLM's kernels where they are, by torch and by Triton's kernels.

The steps are those that vLLM takes after loading (``marlin.py`` and ``cpu.py`` of its ``mixed_precision`` kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from rlrefit.integration.layout.codes import Bytes, Codes, Nibbles, find_codes, tiled
from rlrefit.integration.packing.reordering import Unordered, make_reordering
from tests.marlin import gptq_marlin_repack
from tests.triton_interpreter import run_interpreted

CPU = torch.device("cpu")
Tensors = Mapping[str, torch.Tensor]


def repacked(words: torch.Tensor) -> torch.Tensor:
    """Of int32 ``[k / 8, n]``."""
    return gptq_marlin_repack(words, size_k=8 * words.shape[0], size_n=words.shape[1], num_bits=4)


def permuted(scales: torch.Tensor) -> torch.Tensor:
    """Of ``[groups, n]``, as Marlin has more than one group."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape).contiguous()


def blocked(words: torch.Tensor) -> torch.Tensor:
    """Of int32 ``[n, k / 8]``, as the CPU's kernel has 16 rows side by side."""
    packed = words.contiguous().view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    n, k = codes.shape
    rows = codes.view(n // 16, 16, k).transpose(1, 2).contiguous()
    return (rows[..., 0::2] | (rows[..., 1::2] << 4)).contiguous().view(torch.int32).view(n // 16, -1)


def step(given: Tensors) -> dict[str, torch.Tensor]:
    return {
        "linear": repacked(given["linear"].t().contiguous()),
        "linear scales": permuted(given["linear scales"].t().contiguous()),
        "experts": torch.stack([repacked(one) for one in given["experts"]]),
        "experts' scales": torch.stack([permuted(one) for one in given["experts' scales"]]),
        "CPU": blocked(given["CPU"]),
        "CPU's scales": given["CPU's scales"].t().contiguous(),
    }


def compare_int4_orders(interpret: bool) -> None:
    for n, k, group in ((64, 128, 32), (192, 256, 128), (320, 64, 32)):
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "linear": ((n, k // 8), torch.int32),
            "linear scales": ((n, k // group), torch.bfloat16),
            "experts": ((3, k // 8, n), torch.int32),
            "experts' scales": ((3, k // group, n), torch.bfloat16),
            "CPU": ((n, k // 8), torch.int32),
            "CPU's scales": ((n, k // group), torch.bfloat16),
        }
        asked: dict[str, Codes] = {
            name: (
                Nibbles((*shape[:-1], 8 * shape[-1]), dtype=kind)
                if kind == torch.int32
                else Bytes((*shape[:-1], 2 * shape[-1]), kind)
            )
            for name, (shape, kind) in shapes.items()
        }
        generator = torch.Generator().manual_seed(n)
        given = {
            name: torch.randint(
                0, 256, (prod(shape) * kind.itemsize,), dtype=torch.uint8, generator=generator
            )
            .view(kind)
            .view(shape)
            for name, (shape, kind) in shapes.items()
        }
        expected = step(given)
        jobs = []
        for name, by in find_codes(step, asked, dict, CPU).items():
            codes = asked[name]
            firsts, tiling = tiled(by, codes.bits)
            *_, rows, columns = codes.shape
            parts = given[name] if given[name].dim() == 3 else [given[name]]
            assert firsts == tuple(i * rows * columns for i in range(len(parts)))
            jobs += [Unordered(part, rows, columns, codes.bits, tiling) for part in parts]
        maps, choices = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        make_reordering(jobs, CPU, interpret, aside_bytes=10_000).launch(maps, choices)
        for name, wanted in expected.items():
            got = given[name].reshape(-1).view(torch.uint8)
            assert torch.equal(got, wanted.reshape(-1).view(torch.uint8)), (name, n, k)


def test_torch_makes_the_orders_of_what_was_loaded() -> None:
    compare_int4_orders(interpret=False)


def test_the_kernels_make_the_orders_of_what_was_loaded() -> None:
    run_interpreted(compare_int4_orders, True)
