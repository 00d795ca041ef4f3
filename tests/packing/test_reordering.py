"""Packed matrices put in order where they are: found out from Marlin's step, by torch and by Triton's kernels."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlrefit.integration.layout import codes as packed_codes
from rlrefit.integration.layout.codes import Bytes, Letters, Nibbles, Tiling, find_codes, tiled
from rlrefit.integration.layout.rearrangement import NotRearranged
from rlrefit.integration.packing import reordering
from rlrefit.integration.packing.reordering import Unordered, make_largest_bytes, make_reordering
from tests.marlin import gptq_marlin_repack, permute_scales
from tests.triton_interpreter import run_interpreted

CPU = torch.device("cpu")
Tensors = Mapping[str, torch.Tensor]
LETTERS = tuple(range(0x78, 0x7F))


def marlin(codes: torch.Tensor) -> torch.Tensor:
    n, half = codes.shape
    words = codes.view(torch.int32).T.contiguous()
    return gptq_marlin_repack(words, size_k=2 * half, size_n=n, num_bits=4)


def scales_of_marlin(scales: torch.Tensor) -> torch.Tensor:
    """In order, with each byte made another one: for factor 1, as S0E5M3 has them."""
    groups = permute_scales(scales.view(torch.uint8).numpy().T.copy())
    words = groups.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(groups.shape)
    return became(torch.from_numpy(words))


def became(letters: torch.Tensor) -> torch.Tensor:
    value = letters.view(torch.float8_e4m3fn).half() * 128
    value[value < 2] = 0
    return (value.view(torch.int16) << 1).view(torch.uint8).view(*letters.shape, 2)[..., 1].contiguous()


def turned(codes: torch.Tensor) -> torch.Tensor:
    """The two halves of a row in turns, as elements."""
    elements = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    n, k = elements.shape
    mixed = elements.view(n, k // 8, 2, 4).transpose(-1, -2).reshape(n, k)
    return mixed[:, 0::2] | (mixed[:, 1::2] << 4)


def step(given: Tensors) -> dict[str, torch.Tensor]:
    return {
        "codes": marlin(given["codes"]),
        "scales": scales_of_marlin(given["scales"]),
        # An order in which no two elements of a byte stay together.
        "stack": torch.stack([marlin(turned(one)) for one in given["stack"]]),
    }


def found(n: int, k: int) -> dict[str, tuple[tuple[int, ...], Tiling]]:
    letters = torch.tensor(LETTERS, dtype=torch.uint8)
    scales = Letters((n, k // 16), torch.float8_e4m3fn, LETTERS, tuple(became(letters).tolist()))
    asked = {"codes": Nibbles((n, k)), "scales": scales, "stack": Nibbles((3, n, k))}
    where = find_codes(step, asked, dict, CPU)
    return {name: tiled(by, asked[name].bits) for name, by in where.items()}


def noise(n: int, k: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"codes": (n, k // 2), "scales": (n, k // 16), "stack": (3, n, k // 2)}
    return {
        name: torch.randint(
            0, 0x7F if name == "scales" else 256, shape, dtype=torch.uint8, generator=generator
        )
        for name, shape in shapes.items()
    }


def compare(interpret: bool, shapes: Sequence[tuple[int, int]] = ((64, 16), (128, 48), (64, 208))) -> None:
    maps = torch.stack([torch.full((256,), 9, dtype=torch.uint8), became(torch.arange(256).to(torch.uint8))])
    jobs, memory, expected = [], [], []
    for seed, (n, k) in enumerate(shapes):
        given = noise(n, k, seed)
        expected.append(step({**given, "scales": given["scales"].view(torch.float8_e4m3fn)}))
        memory.append(given)
        for name, (firsts, tiling) in found(n, k).items():
            parts = [given[name]] if name != "stack" else list(given[name])
            bits, columns, slot = (8, k // 16, seed % 2) if name == "scales" else (4, k, None)
            assert firsts == tuple(i * n * columns for i in range(len(parts)))
            jobs += [Unordered(part, n, columns, bits, tiling, slot) for part in parts]
    # So little that there are many groups, and single matrices that have more.
    made = make_reordering(jobs, CPU, interpret, aside_bytes=10_000)
    choices = torch.tensor([1, 1], dtype=torch.int32)
    before = [{name: tensor.clone() for name, tensor in given.items()} for given in memory]
    for _ in range(2):
        made.launch(maps, choices)
        for given, wanted, old in zip(memory, expected, before, strict=True):
            for name, tensor in given.items():
                got = tensor.reshape(-1).view(torch.uint8)
                assert torch.equal(got, wanted[name].reshape(-1).view(torch.uint8)), name
                tensor.copy_(old[name])
    choices[1] = 0
    made.launch(maps, choices)
    assert bool((memory[1]["scales"] == 9).all())
    assert not bool((memory[2]["scales"] == 9).all())
    compare_largest(interpret)


def compare_largest(interpret: bool) -> None:
    first = torch.zeros(40_000, dtype=torch.uint8)
    first[::3], first[39_999], first[7] = 5, 0x7E, 0xFF
    second = torch.full((100,), 0x7F, dtype=torch.uint8)
    third = torch.arange(0, 0x40, dtype=torch.uint8)
    matrices = [(first, 0), (second, 1), (third, 2), (first[:60], 2), (first[:16], 3)]
    out = torch.full((4,), 77, dtype=torch.int32)
    for _ in range(2):
        make_largest_bytes(matrices, CPU, interpret).find(out)
        assert out.tolist() == [0x7E, 0, 0x3F, 5]


def test_torch_makes_marlins_order_of_what_was_loaded() -> None:
    compare(interpret=False)


def test_marlins_order_of_20_random_shapes_is_found_out_and_made_exactly() -> None:
    draw = random.Random(0)
    compare(False, [(64 * draw.randint(1, 5), 16 * draw.randint(1, 20)) for _ in range(20)])


def test_flashinfers_tiles_of_20_random_shapes_of_scales_are_found_out_and_made_exactly() -> None:
    """As vLLM makes them of the scales of MXFP8 layers, whose rows and columns fill tiles."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

    draw, letters = random.Random(1), tuple(range(1, 256))
    for seed in range(20):
        n, k = 128 * draw.randint(1, 6), 4 * draw.randint(1, 24)
        scales = noise(n, 16 * k, seed)["scales"]
        asked = {"scales": Letters((n, k), torch.uint8, letters, letters)}
        by = find_codes(
            lambda given, n=n, k=k: {"scales": swizzle_mxfp8_scale(given["scales"], n, 32 * k)},
            asked,
            dict,
            CPU,
        )
        firsts, tiling = tiled(by["scales"], 8)
        assert firsts == (0,)
        expected = swizzle_mxfp8_scale(scales, n, 32 * k)
        put = make_reordering([Unordered(scales, n, k, 8, tiling, None)], CPU, False)
        put.launch(torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32))
        assert torch.equal(scales.reshape(-1), expected)


def test_the_kernels_make_marlins_order_of_what_was_loaded() -> None:
    run_interpreted(compare, True)


def in_words(order: tuple[int, ...], words: Sequence[int]) -> tuple[int, ...]:
    """The order with these of its words in turn."""
    return tuple(at for word in words for at in order[8 * word : 8 * word + 8])


def orders() -> dict[str, tuple[int, ...]]:
    """Marlin's, with the words of four loaded ones side by side, and with its words anyhow."""
    order = found(64, 16)["codes"][1].order
    words = list(range(128))
    side_by_side = [16 * (q // 4) + 4 * u + q % 4 for q in range(32) for u in range(4)]
    return {
        "marlin": order,
        "side by side": in_words(order, side_by_side),
        "anyhow": in_words(order, random.Random(0).sample(words, len(words))),
    }


def test_words_of_marlins_order_are_made_of_four_loaded_ones_each() -> None:
    quads = {name: reordering._quads(order, 16) for name, order in orders().items()}
    marlins, others = quads["marlin"], quads["side by side"]
    assert marlins is not None
    assert others is not None
    assert (marlins.lanes, others.lanes) == (4, 1)
    assert [len(part) for part in marlins.sources] == [32] * 4
    assert quads["anyhow"] is None
    # Each loaded word goes into one place alone.
    assert len({word for part in marlins.sources for word in part}) == 128
    assert reordering._quads(found(64, 16)["stack"][1].order, 16) is None


def compare_orders(tilings: Sequence[Tiling]) -> None:
    """Put matrices in order by the kernels, as torch does."""
    maps, choices = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    n, k = len(tilings[0].row_starts) * 64, len(tilings[0].column_starts) * 16
    given = [noise(n, k, i)["codes"] for i in range(len(tilings))]
    made = []
    for interpret in (False, True):
        memory = [codes.clone() for codes in given]
        jobs = [Unordered(codes, n, k, 4, tiling) for codes, tiling in zip(memory, tilings, strict=True)]
        make_reordering(jobs, CPU, interpret).launch(maps, choices)
        made.append(memory)
    for expected, got in zip(*made, strict=True):
        assert torch.equal(got, expected)


def test_the_kernels_put_paired_elements_in_any_order() -> None:
    # More tiles in a row than one program makes.
    rows, columns = (21, 0), tuple(range(21))
    run_interpreted(compare_orders, [Tiling(64, 16, order, rows, columns) for order in orders().values()])


def test_marlins_tiles_are_found_out() -> None:
    for n, k in ((64, 32), (192, 48)):
        of = {name: tiling for name, (_, tiling) in found(n, k).items()}
        assert (of["codes"].rows, of["codes"].columns) == (64, 16)
        assert (of["scales"].rows, of["scales"].columns) == (64, 1)
        assert (of["stack"].rows, of["stack"].columns) == (64, 16)
        assert of["stack"] != of["codes"]


def _doubled(codes: torch.Tensor) -> torch.Tensor:
    made = marlin(codes).clone()
    made[0, 0] = made[0, 1]
    return made


@pytest.mark.parametrize(
    "spoiled",
    [
        _doubled,
        lambda codes: marlin(codes) ^ 1,
        lambda codes: marlin(codes)[:1],
        lambda codes: marlin(codes).T,
        lambda codes: marlin(codes.flip(0) if int(codes[0, 1]) & 2 else codes),
    ],
    ids=["doubled", "changed", "lost", "strided", "by value"],
)
def test_what_is_no_order_is_refused(spoiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(NotRearranged):
        find_codes(lambda given: {"codes": spoiled(given["codes"])}, {"codes": Nibbles((64, 32))}, dict, CPU)


def test_an_order_without_tiles_is_refused() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).permutation(64))
    by = find_codes(lambda given: {"codes": given["codes"][rows]}, {"codes": Nibbles((64, 6))}, dict, CPU)[
        "codes"
    ]
    with pytest.raises(NotRearranged):
        tiled(by, 4)


class _Memory(TorchDispatchMode):
    """Counts the bytes of all storages that torch's operations make inside, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._live:
                    gone = weakref.ref(storage, lambda _, key=key: self._live.pop(key))
                    self._live[key] = gone, storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def test_an_order_is_found_out_in_little_memory_beside_what_the_step_takes_and_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_codes, "_LOOKED_AT", 1 << 12)
    experts, n, k = 4, 512, 256
    letters = tuple(range(1, 255))
    asked = {
        "codes": Nibbles((experts, n, k)),
        "scales": Letters((experts, n, k // 32), torch.uint8, letters, letters),
        "biases": Bytes((experts, 2 * n), torch.bfloat16),
    }
    order = torch.arange(n).view(-1, 8).flip(1).reshape(-1)

    def turn(given: Tensors) -> dict[str, torch.Tensor]:
        return {name: tensor[:, order].contiguous() for name, tensor in given.items()}

    with _Memory() as memory:
        found = find_codes(turn, asked, dict, CPU)
    size = experts * n * (k // 2 + k // 32 + 2)
    assert memory.peak < 2.5 * size
    rows = torch.argsort(order).tolist()
    assert found["codes"].steps[1] == tuple((row - rows[0]) * k for row in rows)
    assert found["scales"].steps[1] == tuple((row - rows[0]) * (k // 32) for row in rows)
    at = [2 * row + byte - 2 * rows[0] for row in rows for byte in (0, 1)]
    assert found["biases"].steps[1] == tuple(at)
    assert {name: by.first for name, by in found.items()} == {
        "codes": rows[0] * k,
        "scales": rows[0] * (k // 32),
        "biases": 2 * rows[0],
    }
