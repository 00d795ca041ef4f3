"""The Triton kernels compiled for a Hopper GPU, on any machine: as wide accesses as their tables promise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import check_output
from typing import Any

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlrefit.integration.delta import blocks, packer
from rlrefit.integration.delta import kernels as delta_kernels
from rlrefit.integration.packing import kernels
from rlrefit.integration.quantize import fp8_kernels

_HOPPER = GPUTarget("cuda", 90, 32)
# Arguments that are not of int64.
_NARROW = {"data": "*u8", "scratch": "*u16", "copy": "*u8"}
_PACK_POINTERS = ("place", "counts", "total", "entries", "data", "scratch")
_PLACES: dict[str, Any] = {"COLUMNS": 11, "TILE": 512, "NESTED": True}


def compiled(kernel: Any, constants: dict[str, Any], pointers: Sequence[str], **options: int) -> Any:
    """The kernel's code."""
    signature = {"tiles": "*i32", "rows": "*i64", **dict.fromkeys(pointers, "*i64")}
    signature |= {name: kind for name, kind in _NARROW.items() if name in pointers}
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        signature=ordered,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(2 + len(pointers))},
    )
    return triton.compile(source, target=_HOPPER, options=options).asm


def accesses(kernel: Any, constants: dict[str, Any], warps: int, *pointers: str) -> Counter[str]:
    """How often each kind of access to global memory stands in the kernel's code."""
    code = compiled(kernel, constants, pointers, num_warps=warps)["ptx"]
    return Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", code))


def test_a_unit_of_16_bytes_is_one_access_of_a_copy() -> None:
    word, size, lanes = kernels.COPY_WORDS[16]
    found = accesses(
        kernels.copy_segments, {**_PLACES, "WORD": word, "WORD_BYTES": size, "LANES": lanes, "TILE": 1024}, 8
    )
    assert (found["ld.global.v2.b64"], found["st.global.v2.b64"]) == (4, 4)


def test_checksums_read_units_of_16_bytes() -> None:
    word, size, lanes = kernels.CHECKSUM_WORDS[16]
    constants = {**_PLACES, "WORD": word, "WORD_BYTES": size, "LANES": lanes}
    assert accesses(kernels.checksum_segments, constants, 4, "out")["ld.global.v4.b32"] == 4


@pytest.mark.parametrize(("source", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
def test_casts_read_and_write_16_bytes_at_a_time(source: Any, size: int) -> None:
    types = {"SOURCE": source, "SOURCE_BYTES": size, "TARGET": tl.float16, "TARGET_BYTES": 2, "LANES": 16}
    found = accesses(kernels.cast_segments, {**_PLACES, **types}, 8)
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (2 * size, 4)
    assert found["st.global.b16"] == 0


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize(("cut", "given"), [(False, False), (True, False), (True, True)])
def test_blocks_are_read_and_their_codes_written_16_bytes_at_a_time(
    converts: bool, cut: bool, given: bool
) -> None:
    constants = {"COLUMNS": 16, "WORD": tl.bfloat16, "BLOCK": 128, "FLOOR": 1e-4, "UE8M0": False}
    constants |= {"ROUND": False, "UNIT": 16, "CONVERTS": converts, "CUT": cut, "GIVEN": given}
    found = accesses(fp8_kernels.quantize_blocks, constants, 4)
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (16, 8)
    assert found["st.global.b8"] == 0


@pytest.mark.parametrize(
    ("size", "unit", "nested"), [(2, 16, False), (1, 16, True), (4, 4, True), (8, 8, False)]
)
def test_units_are_compared_16_bytes_at_a_time_and_all_elements_packed(
    size: int, unit: int, nested: bool
) -> None:
    found = accesses(delta_kernels.pack_changed, pack_constants(size, unit, nested), 4, *_PACK_POINTERS)
    wide = "ld.global.v2.b64"
    assert found[wide] >= (16 if unit == 16 else 0)
    # By a mask nothing is read as wide words but what is marked, and a unit's marks are one access.
    constants = pack_constants(size, unit, nested, marked=True)
    by_mask = accesses(delta_kernels.pack_changed, constants, 4, *_PACK_POINTERS)
    assert by_mask[wide] < found[wide] or not found[wide]
    assert by_mask[f"ld.global.b{16 if size == 1 else 8}"] >= 8


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(("size", "unit"), [(2, 16), (1, 16), (4, 16), (2, 4)])
def test_a_step_is_recorded_16_bytes_at_a_time(size: int, unit: int, marks: bool) -> None:
    constants = {**_PLACES, "WORD": delta_kernels.WORDS[size], "ITEM": size, "LANES": unit // size}
    found = accesses(delta_kernels.record_changes, constants | {"MARKS": marks}, 4, "copy", "place")
    if unit == 16:
        assert found["ld.global.v4.b32"] == (8 if marks else 4)
        assert found["st.global.v4.b32"] == (0 if marks else 4)


def packer_of(marked: bool) -> type[packer.DevicePacker | packer.DeviceMaskPacker]:
    return packer.DeviceMaskPacker if marked else packer.DevicePacker


def pack_constants(size: int, unit: int, nested: bool, *, marked: bool = False) -> dict[str, Any]:
    word, _, lanes = kernels.COPY_WORDS[unit]
    elements = unit // size
    return {
        "COLUMNS": 11,
        "WIDE": word,
        "WIDE_LANES": lanes,
        "WORD": delta_kernels.WORDS[size],
        "ITEM": size,
        "ALIGN": max(4, size),
        "LANES": elements,
        "TILE": min(packer_of(marked).tile, blocks.MOST * size // unit),
        "CHUNK": min(1024 // elements, 256),
        "NESTED": nested,
        "MARKED": marked,
    }


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_programs_that_pack_fit_on_a_gpu_at_once(size: int, marked: bool, tmp_path: Path) -> None:
    constants = pack_constants(size, 16, False, marked=marked)
    programs = packer_of(marked).each
    registers = packer.registers_of(programs)
    code = compiled(delta_kernels.pack_changed, constants, _PACK_POINTERS, num_warps=4, maxnreg=registers)
    (tmp_path / "pack.cubin").write_bytes(code["cubin"])
    told = check_output(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", tmp_path / "pack.cubin"], text=True
    )
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED):(\d+)", told)}
    assert used["REG"] * 32 * 4 * programs <= 1 << 16
    assert used["SHARED"] * programs <= 100_000
    # What finds no register lies there; with a mask that is worth the programs (packing 8 GB takes 3.8 ms and not 4.0 at 1%).
    assert used["STACK"] <= (160 if marked else 32)
