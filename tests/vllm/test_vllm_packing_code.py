"""The code by which vLLM's libraries for AVX-512 and AMX pack experts, on whatever CPU the machine has.

A library as a whole runs nowhere else: what torch is told of it as it is loaded is code for AVX-512 already. Its functions that pack
are not (in the release that is pinned), so that they can be called once it is loaded without that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.layout.rearrangement import recover
from tests.layout.test_rearrangement import replayed
from tests.spawn import run_alone
from tests.vllm_processes import vllm_processes

# By library and kernel, its ISA's number in the names of functions.
PACKINGS = {("_C_AVX512", "vec"): 1, ("_C", "vec"): 1, ("_C", "amx"): 0}
CPU = torch.device("cpu")
DTYPES = {torch.bfloat16: "N3c108BFloat16E", torch.float16: "N3c104HalfE"}
_DYNAMIC, _INIT_ARRAY_SIZE, _FINI_ARRAY_SIZE = 2, 27, 28


def bare(library: Path, folder: Path) -> ctypes.CDLL:
    """The library without what it runs as it is loaded and unloaded."""
    copy = folder / library.name
    shutil.copyfile(library, copy)
    with copy.open("r+b") as file:
        header = file.read(64)
        [table] = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = struct.iter_unpack("<IIQQQQQQ", file.read(size * count))
        offset, length = next((s[2], s[5]) for s in segments if s[0] == _DYNAMIC)
        file.seek(offset)
        entries = [
            (tag, 0 if tag in (_INIT_ARRAY_SIZE, _FINI_ARRAY_SIZE) else value)
            for tag, value in struct.iter_unpack("<QQ", file.read(length))
        ]
        file.seek(offset)
        file.write(b"".join(struct.pack("<QQ", *entry) for entry in entries))
    loaded = ctypes.CDLL(str(copy))
    copy.unlink()  # more than 100 MB
    return loaded


def packs_as_expected(library: str, isa: str, folder: str) -> list[tuple[bool, bool]]:
    """For 20 random weights, whether the stand-in packs alike, and whether strided views found out from another run do."""
    from tests.vllm_stand_ins import tiled

    found = importlib.util.find_spec("vllm")
    loaded = bare(Path(found.submodule_search_locations[0], f"{library}.abi3.so"), Path(folder))
    generator = torch.Generator().manual_seed(0)
    seen: list[tuple[bool, bool]] = []
    for case in range(20):
        dtype = list(DTYPES)[case % len(DTYPES)]
        gemm = f"MicroGemmILN9cpu_utils3ISAE{PACKINGS[library, isa]}E{DTYPES[dtype]}E"
        function = loaded[f"_ZN14cpu_micro_gemm9{gemm}11pack_weightEPKS4_PS4_ii"]
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]

        def pack(weight: torch.Tensor, function: Any = function) -> torch.Tensor:
            made = torch.full_like(weight, torch.nan)
            for given, packed in zip(weight, made, strict=True):
                function(given.data_ptr(), packed.data_ptr(), *given.shape)
            return made

        experts, rows, columns = torch.randint(1, 6, (3,), generator=generator).tolist()
        weight = torch.randn(experts, 32 * rows, 32 * columns, generator=generator).to(dtype)
        [by] = recover(lambda given: {"w": pack(given["w"])}, {"w": (weight.shape, dtype)}, CPU).values()
        made = pack(weight)
        assert not torch.equal(made, weight)
        seen.append(
            (
                torch.equal(made, tiled(weight, isa, packed=False)),
                torch.equal(made, replayed(by, weight, made)),
            )
        )
    return seen


@pytest.mark.parametrize(("library", "isa"), list(PACKINGS))
def test_vllms_own_packing_is_another_order_of_elements_and_what_other_tests_take_for_it(
    library: str, isa: str, tmp_path: Path
):
    seen = run_alone(packs_as_expected, library, isa, str(tmp_path), environment={}, made_by=vllm_processes)
    assert seen == [(True, True)] * 20
