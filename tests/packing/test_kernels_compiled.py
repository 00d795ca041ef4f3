"""The Triton kernels compiled for a Hopper GPU, on any machine: as wide accesses as their tables promise."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from subprocess import check_output
from typing import Any

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlrefit.integration.delta import applier, blocks, packer
from rlrefit.integration.delta import kernels as delta_kernels
from rlrefit.integration.packing import kernels, reordering_kernels
from rlrefit.integration.quantize import fp8_kernels, int4_kernels, mxfp4_kernels, nvfp4_kernels

_HOPPER = GPUTarget("cuda", 90, 32)
# Arguments that are not of int64.
_NARROW = {
    "tiles": "*i32",
    "data": "*u8",
    "scratch": "*u16",
    "copy": "*u8",
    "near": "*i32",
    "aside": "*u8",
    "maps": "*u8",
}
_NARROW |= {"choices": "*i32", "global_scales": "*fp32", "covered_at": "*u8"}
_NARROW |= dict.fromkeys(("blocks", "blocks_of_each", "groups"), "i32")
_POINTERS = {tl.float32: "*fp32", tl.bfloat16: "*bf16"}
_PLACES: dict[str, Any] = {"COLUMNS": 11, "TILE": 512, "NESTED": True}


def compiled(kernel: Any, constants: dict[str, Any], kind: str = "*i64", **options: int) -> Any:
    """The kernel's code. ``kind``: of arguments that ``_NARROW`` doesn't name."""
    signature = {
        name: "constexpr" if name in constants else _NARROW.get(name, kind) for name in kernel.arg_names
    }
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(signature.values())
            if kind.startswith("*")
        },
    )
    return triton.compile(source, target=_HOPPER, options=options).asm


def accesses(kernel: Any, constants: dict[str, Any], warps: int) -> Counter[str]:
    """How often each kind of access to global memory stands in the kernel's code."""
    code = compiled(kernel, constants, num_warps=warps)["ptx"]
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
    assert accesses(kernels.checksum_segments, constants, 4)["ld.global.v4.b32"] == 4


@pytest.mark.parametrize(("source", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
def test_casts_read_and_write_16_bytes_at_a_time(source: Any, size: int) -> None:
    types = {"SOURCE": source, "SOURCE_BYTES": size, "TARGET": tl.float16, "TARGET_BYTES": 2, "LANES": 16}
    found = accesses(kernels.cast_segments, {**_PLACES, **types}, 8)
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (2 * size, 4)
    assert found["st.global.b16"] == 0


@pytest.mark.parametrize(("source", "size"), [(tl.float32, 4), (tl.bfloat16, 2), (tl.uint8, 1)])
def test_the_largest_magnitudes_are_read_16_bytes_at_a_time(source: Any, size: int) -> None:
    constants = {**_PLACES, "SOURCE": source, "SOURCE_BYTES": size, "LANES": 16, "TILE": 512, "COUNT": 1000}
    found = accesses(kernels.largest_magnitudes, constants, 4)
    assert found["ld.global.v4.b32"] == 4 * size


def test_matrices_are_set_aside_16_bytes_at_a_time() -> None:
    found = accesses(reordering_kernels.set_aside, {"TILE": 1024}, 4)
    assert (found["ld.global.v2.b64"], found["st.global.v2.b64"]) == (8, 8)


@pytest.mark.parametrize(
    ("bits", "words", "mapped", "paired"),
    [
        (4, 128, False, True),
        (4, 128, False, False),
        (8, 16, True, False),
        (8, 16, False, False),
        (8, 1, False, False),
        (16, 32, False, False),
    ],
)
def test_matrices_are_put_in_order_without_spilling(
    bits: int, words: int, mapped: bool, paired: bool, tmp_path: Path
) -> None:
    constants = {"BITS": bits, "WORDS": words, "TILES": 512 // words, "MAPPED": mapped, "PAIRED": paired}
    made = compiled(reordering_kernels.put_in_order, constants, num_warps=4)
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


@pytest.mark.parametrize("wide", [True, False])
def test_quads_are_read_in_words_and_written_16_bytes_at_a_time_without_spilling(
    wide: bool, tmp_path: Path
) -> None:
    constants = {"QUADS": 32, "LANES": 4, "TILES": 16, "WIDE": wide}
    made = compiled(reordering_kernels.put_quads_in_order, constants, num_warps=4)
    # A thread has 4 quads. It reads 4 words of each and where they are. It writes to 4 tiles, and reads where these and their row
    # begin, and which matrix it is about.
    found = Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", made["ptx"]))
    assert "ld.global.b8" not in found
    assert found["st.global.v4.b32"] == 4
    assert found["ld.global.b32"] == 4 * (4 + 4) + 4 + 2
    # Neighbours in a warp read neighbouring tiles.
    assert "threadsPerWarp = [32], warpsPerCTA = [4], order = [0]" in made["ttgir"]
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("source", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
def test_blocks_of_nvfp4_are_read_16_bytes_at_a_time(
    source: Any, size: int, flat: bool, tmp_path: Path
) -> None:
    constants = {"COLUMNS": 18, "WORD": source, "BLOCKS": 256, "TINIEST": 2.0**-9, "ROUND": size == 4}
    constants |= {"UNIT": 16, "FLAT": flat, "MOST": 2.0**7}
    made = compiled(nvfp4_kernels.quantize_nvfp4, constants, num_warps=4)
    assert made["ptx"].count("ld.global.v4.b32") == 2 * size
    # A thread has 32 elements, of 4 or 8 blocks. It makes reciprocals for the blocks and the global scale, and a quotient of
    # each block and element. No other product is added before it is rounded.
    blocks = 2 * size
    assert made["ptx"].count("div.full") == blocks + 1
    assert made["ptx"].count("fma.rn") == 2 * (blocks + 1) + 4 * (blocks + 32)
    # One note of the largest of a program.
    assert made["ptx"].count("atom.") == 1
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


@pytest.mark.parametrize(("source", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
def test_blocks_of_mxfp4_are_read_16_bytes_at_a_time(source: Any, size: int, tmp_path: Path) -> None:
    constants = {"WORD": source, "BLOCKS": 128, "ROUND": size == 4, "DOWN": False, "UNIT": 16}
    made = compiled(mxfp4_kernels.quantize_mxfp4, constants, num_warps=4)
    assert made["ptx"].count("ld.global.v4.b32") == 2 * size
    assert "div.full" not in made["ptx"]
    assert "fma" not in made["ptx"]
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


def test_blocks_of_mxfp4_whose_columns_are_contiguous_are_read_without_spilling(tmp_path: Path) -> None:
    constants = {"WORD": tl.bfloat16, "BLOCKS": 128, "ROUND": False, "DOWN": True, "UNIT": 1}
    made = compiled(mxfp4_kernels.quantize_mxfp4, constants, num_warps=4)
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


@pytest.mark.parametrize(("group", "down"), [(32, 0), (128, 0), (32, 64), (128, 32)])
@pytest.mark.parametrize(
    ("source", "size", "largest"), [(tl.float32, 4, False), (tl.bfloat16, 2, False), (tl.bfloat16, 2, True)]
)
def test_groups_of_int4_are_read_16_bytes_at_a_time(
    source: Any, size: int, largest: bool, group: int, down: int, tmp_path: Path
) -> None:
    constants = {"COLUMNS": 16, "WORD": source, "BLOCKS": 4096 // group, "GROUP": group, "KIND": source}
    constants |= {"EPSILON": 2.0**-7, "LARGEST": largest, "ROUND": False, "UNIT": 16, "DOWN": down}
    made = compiled(int4_kernels.quantize_int4, constants, num_warps=4)
    assert made["ptx"].count("ld.global.v4.b32") == 2 * size
    # A thread has 32 elements, of 4 or 8 groups, and writes 4 words of codes.
    groups = 2 * size
    assert made["ptx"].count("st.global.b32") == 4 + (size == 4)
    assert made["ptx"].count("div.full") == groups
    # By compressed-tensors' rule BF16 takes a product and two roundings instead of two corrections.
    assert made["ptx"].count("fma.rn") == 2 * groups + (4 if size == 4 or largest else 3) * 32
    assert resources(made["cubin"], tmp_path)["STACK"] <= 16


@pytest.mark.parametrize(("kind", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
@pytest.mark.parametrize("activations", [True, False])
def test_what_takes_the_place_of_numbers_is_written_16_bytes_at_a_time(
    kind: Any, size: int, activations: bool, tmp_path: Path
) -> None:
    constants = {"BLOCKS": 256, "KIND": kind, "ACTIVATIONS": activations, "EACH": False}
    constants |= {"COVERED": 2688.0 * activations, "TINIEST": 2.0**-9, "MOST": 2.0**7}
    made = compiled(nvfp4_kernels._round_trip, constants, _POINTERS[kind], num_warps=4)
    # Which activations are covered takes a byte each.
    check_16_bytes_at_a_time(made, 2 * size, 2 * size + 2 * activations, tmp_path)


@pytest.mark.parametrize(("kind", "size"), [(tl.float32, 4), (tl.bfloat16, 2)])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("group", [32, 128])
def test_what_takes_the_place_of_int4_weights_is_written_16_bytes_at_a_time(
    kind: Any, size: int, largest: bool, group: int, tmp_path: Path
) -> None:
    constants = {
        "BLOCKS": 4096 // group,
        "GROUP": group,
        "KIND": kind,
        "EPSILON": 2.0**-7,
        "LARGEST": largest,
    }
    made = compiled(int4_kernels._round_trip, constants, _POINTERS[kind], num_warps=4)
    check_16_bytes_at_a_time(made, 2 * size, 2 * size, tmp_path)


def check_16_bytes_at_a_time(made: Any, reads: int, writes: int, folder: Path) -> None:
    """Of a thread."""
    found = Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", made["ptx"]))
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (reads, writes)
    assert resources(made["cubin"], folder)["STACK"] <= 16


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


@pytest.mark.parametrize(("marks", "copies"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("size", "unit"), [(2, 16), (1, 16), (4, 16), (2, 4)])
def test_weights_are_compared_16_bytes_at_a_time(size: int, unit: int, marks: bool, copies: bool) -> None:
    constants = {**_PLACES, "WORD": delta_kernels.WORDS[size], "ITEM": size, "LANES": unit // size}
    constants |= {"MARKS": marks, "COPIES": copies}
    found = accesses(delta_kernels.record_changes, constants, 4)
    if unit == 16:
        assert found["ld.global.v4.b32"] == (8 if marks else 4)
        assert found["st.global.v4.b32"] == (4 if copies else 0)


def pack_code(size: int) -> Any:
    constants = {
        "COLUMNS": 8,
        "WORD": delta_kernels.WORDS[size],
        "ITEM": size,
        "ALIGN": max(4, size),
        "TILE": packer.TILE,
        "CHUNK": packer.CHUNK,
        "LISTED": packer.LISTED,
    }
    registers = packer.registers_of(packer.PROGRAMS, packer.WARPS)
    return compiled(delta_kernels.pack_marked, constants, num_warps=packer.WARPS, maxnreg=registers)


def apply_code(size: int) -> Any:
    constants = {
        "WORD": delta_kernels.WORDS[size],
        "ITEM": size,
        "ALIGN": max(4, size),
        "MOST": blocks.MOST,
        "CHUNK": applier.CHUNK,
        "LISTED": packer.LISTED,
        "GRAIN": applier.GRAIN,
    }
    registers = packer.registers_of(applier.PROGRAMS, applier.WARPS)
    return compiled(delta_kernels.apply_blocks, constants, num_warps=applier.WARPS, maxnreg=registers)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and of a program's shared memory."""
    (folder / "kernel.cubin").write_bytes(cubin)
    told = check_output(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", folder / "kernel.cubin"], text=True
    )
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED):(\d+)", told)}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("code", "programs", "warps"),
    [
        (pack_code, packer.PROGRAMS, packer.WARPS),
        (apply_code, applier.PROGRAMS, applier.WARPS),
    ],
)
def test_all_programs_that_pack_or_write_fit_on_a_gpu_at_once(
    code: Any, programs: int, warps: int, size: int, tmp_path: Path
) -> None:
    made = code(size)
    # Bits are counted by an instruction of their own.
    assert "popc.b32" in made["ptx"]
    used = resources(made["cubin"], tmp_path)
    assert used["REG"] * 32 * warps * programs <= 1 << 16
    assert used["SHARED"] * programs <= 100_000
    # What finds no register lies there.
    assert used["STACK"] <= 128
