"""Formats in which an engine holds quantized weights and a trainer can make them.

A format turns a weight ``[n, k]`` into *codes* and *scales*, under the names that checkpoints of the format give them: codes
mostly have the weight's own. Both are tensors of the Hugging Face name space like any others: planned, sent,
verified and loaded as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch

from ..config import INT4_SCALES
from ..control.decoding import decode
from ..layout import Box
from ..packing.encoded import EncodedPair, Encoder
from . import blocks, fp8_blockwise, int4, mxfp8, nvfp4
from .fp8_table import Fp8Table, has_kernel
from .int4_table import Int4Table
from .jobs import GlobalScale, QuantizeJob, TorchEncoder, make_jobs
from .mxfp8_table import Mxfp8Table
from .nvfp4_table import Nvfp4Table
from .partial_blocks import PartialBlocks

_OF_16_BITS = (torch.bfloat16, torch.float16)


class Format(Protocol):
    """A way of holding weights ``[n, k]``; a frozen dataclass of plain values.

    Attributes:
        kind: its name.
        setting: the key of ``policy.refit`` by which a trainer makes it.
        code_name_end: what the codes' name has behind the weight's name.
        code_dtype: of the codes.
        packed: elements of a row in one item of the codes.
        has_global_scale: whether a whole weight has a scale over those of its blocks.
    """

    kind: ClassVar[str]
    setting: ClassVar[str]
    code_name_end: ClassVar[str]
    code_dtype: ClassVar[torch.dtype]
    packed: ClassVar[int]
    has_global_scale: ClassVar[bool]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""

    @property
    def made_of(self) -> tuple[torch.dtype, ...]:
        """Which dtypes weights may have."""

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""

    @property
    def scale_name_end(self) -> str:
        """What the scales' name has behind the weight's name."""

    def partial_blocks(self, rounded: torch.dtype | None) -> PartialBlocks | None:
        """How parts of weights that cut blocks are quantized; None if they can't be."""

    @property
    def encode(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Codes (``[n, k / packed]``) and scales of a whole weight, or of a part that cuts no block; and of its global scale, an FP32
        scalar, in formats that have one."""

    def has_kernel(self, rounded: torch.dtype | None) -> bool:
        """Whether GPUs do the same by a kernel, of weights that are ``rounded`` to this type first."""

    def on_device(self, jobs: Sequence[QuantizeJob], device: torch.device, round_to_bf16: bool) -> Encoder:
        """Jobs of parts that cut no block, by that kernel."""


@dataclass(frozen=True)
class Fp8Blockwise:
    """E4M3 in blocks with FP32 scales: :mod:`.fp8_blockwise`.

    Attributes:
        block: rows and columns of a block.
        ue8m0: whether scales are powers of two (still in FP32 tensors).
        scale_name_end: as block-FP8 checkpoints have it since DeepSeek-V3.
    """

    kind: ClassVar[str] = "fp8_blockwise"
    setting: ClassVar[str] = "trainer_quantize_fp8"
    code_name_end: ClassVar[str] = ""
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    packed: ClassVar[int] = 1
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    made_of: ClassVar[tuple[torch.dtype, ...]] = _OF_16_BITS
    has_global_scale: ClassVar[bool] = False

    block: tuple[int, int] = fp8_blockwise.BLOCK
    ue8m0: bool = False
    scale_name_end: str = "_scale_inv"

    @property
    def scale_format(self) -> fp8_blockwise.ScaleFormat:
        """The same in the numerics' words."""
        return fp8_blockwise.ScaleFormat.UE8M0 if self.ue8m0 else fp8_blockwise.ScaleFormat.FP32

    def partial_blocks(self, rounded: torch.dtype | None) -> PartialBlocks | None:
        return PartialBlocks(self.block, self.scale_format, rounded)

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fp8_blockwise.quantize(weight, self.block, self.scale_format)

    def has_kernel(self, rounded: torch.dtype | None) -> bool:
        return has_kernel(self.block, rounded)

    def on_device(self, jobs: Sequence[QuantizeJob], device: torch.device, round_to_bf16: bool) -> Encoder:
        return Fp8Table.build(jobs, device, self.scale_format, round_to_bf16)


@dataclass(frozen=True)
class Mxfp8:
    """E4M3 with one E8M0 scale for 32 elements of a row: :mod:`.mxfp8`.

    Attributes:
        rounding: which power of two a block gets, one of :class:`.mxfp8.Rounding`'s values.
        scale_name_end: as ModelOpt's and compressed-tensors' checkpoints have it.
    """

    kind: ClassVar[str] = "mxfp8"
    setting: ClassVar[str] = "trainer_quantize_fp8"
    code_name_end: ClassVar[str] = ""
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    packed: ClassVar[int] = 1
    scale_dtype: ClassVar[torch.dtype] = torch.uint8
    made_of: ClassVar[tuple[torch.dtype, ...]] = _OF_16_BITS
    has_global_scale: ClassVar[bool] = False

    rounding: str = mxfp8.Rounding.UP.value
    scale_name_end: str = "_scale"

    @property
    def block(self) -> tuple[int, int]:
        return (1, mxfp8.BLOCK)

    def partial_blocks(self, rounded: torch.dtype | None) -> PartialBlocks | None:
        return None

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mxfp8.quantize(weight, mxfp8.Rounding(self.rounding))

    def has_kernel(self, rounded: torch.dtype | None) -> bool:
        return rounded in (None, torch.bfloat16)

    def on_device(self, jobs: Sequence[QuantizeJob], device: torch.device, round_to_bf16: bool) -> Encoder:
        return Mxfp8Table.build(jobs, device, mxfp8.Rounding(self.rounding), round_to_bf16)


@dataclass(frozen=True)
class Nvfp4:
    """E2M1 two to a byte, with one E4M3 scale for 16 elements of a row, under a global scale: :mod:`.nvfp4`.

    Attributes:
        scale_name_end: as ModelOpt's checkpoints have it.
    """

    kind: ClassVar[str] = "nvfp4"
    # None: training makes it (docs/nvfp4.md).
    setting: ClassVar[str] = ""
    code_name_end: ClassVar[str] = ""
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    packed: ClassVar[int] = nvfp4.PER_BYTE
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    made_of: ClassVar[tuple[torch.dtype, ...]] = _OF_16_BITS
    has_global_scale: ClassVar[bool] = True

    scale_name_end: str = "_scale"

    @property
    def block(self) -> tuple[int, int]:
        return (1, nvfp4.BLOCK)

    def partial_blocks(self, rounded: torch.dtype | None) -> PartialBlocks | None:
        return None

    def encode(self, weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales, _ = nvfp4.quantize(weight, global_scale)
        return codes, scales

    def has_kernel(self, rounded: torch.dtype | None) -> bool:
        return rounded in (None, torch.bfloat16)

    def on_device(self, jobs: Sequence[QuantizeJob], device: torch.device, round_to_bf16: bool) -> Encoder:
        return Nvfp4Table.build(jobs, device, round_to_bf16)


@dataclass(frozen=True)
class Int4:
    """INT4 eight to an item, with one scale for a group of a row: :mod:`.int4`.

    Attributes:
        group: elements of a row that share a scale, one of :data:`.int4.GROUPS`.
        dtype: torch's name of the dtype of the weights and of their scales.
        scale_name_end: as compressed-tensors' checkpoints have it.
        scale_rule: by which a trainer makes scales, one of :data:`..config.INT4_SCALES`. An engine computes with any, and tells the first.
    """

    kind: ClassVar[str] = "int4"
    setting: ClassVar[str] = "trainer_quantize_int4"
    code_name_end: ClassVar[str] = "_packed"
    code_dtype: ClassVar[torch.dtype] = torch.int32
    packed: ClassVar[int] = int4.PER_ITEM
    has_global_scale: ClassVar[bool] = False

    group: int
    dtype: str = "bfloat16"
    scale_name_end: str = "_scale"
    scale_rule: str = INT4_SCALES[0]

    def __post_init__(self) -> None:
        int4.check_group(self.group)
        if self.scale_rule not in INT4_SCALES:
            raise ValueError(f"scales of INT4 are {' or '.join(INT4_SCALES)}, not {self.scale_rule!r}")
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"scales of INT4 are bfloat16 or float16, not {self.dtype}")

    def __str__(self) -> str:
        # Errors tell by it what engines hold, which have no rule.
        return f"Int4(group={self.group}, dtype={self.dtype!r}, scale_name_end={self.scale_name_end!r})"

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float16

    @property
    def made_of(self) -> tuple[torch.dtype, ...]:
        return (self.scale_dtype,)

    @property
    def block(self) -> tuple[int, int]:
        return (1, self.group)

    def partial_blocks(self, rounded: torch.dtype | None) -> PartialBlocks | None:
        return None

    def encode(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return int4.quantize(weight, self.group, self.scale_rule)

    def has_kernel(self, rounded: torch.dtype | None) -> bool:
        return rounded in (None, torch.bfloat16)

    def on_device(self, jobs: Sequence[QuantizeJob], device: torch.device, round_to_bf16: bool) -> Encoder:
        return Int4Table.build(jobs, device, self.group, round_to_bf16, self.scale_rule)


FORMATS: dict[str, type[Fp8Blockwise] | type[Mxfp8] | type[Nvfp4] | type[Int4]] = {
    f.kind: f for f in (Fp8Blockwise, Mxfp8, Nvfp4, Int4)
}


def as_made(formats: Mapping[str, Format], scale_rule: str) -> dict[str, Format]:
    """Formats of which engines tell, as the trainer makes them: with its rule for the scales of INT4."""
    return {
        name: replace(format, scale_rule=scale_rule) if isinstance(format, Int4) else format
        for name, format in formats.items()
    }


def wire_names(name: str, format: Format) -> tuple[str, str]:
    """Of the codes and the scales of the weight ``name``."""
    return name + format.code_name_end, name + format.scale_name_end


@dataclass(frozen=True)
class WholeBlocks:
    """How weights are quantized, or parts that cut no block: a :class:`..packing.encoded.EncodingMethod`.

    Attributes:
        format: of the result.
        rounded: the type in which weights are exported, if they are kept in another: they are rounded to it first.
    """

    format: Format
    rounded: torch.dtype | None = None

    @property
    def block(self) -> tuple[int, int]:
        return self.format.block

    def has_kernel(self, source: torch.dtype) -> bool:
        return self.format.has_kernel(self.rounded)

    def prepare(self, pairs: Sequence[EncodedPair], device: torch.device) -> Encoder:
        jobs = make_jobs(pairs)
        if device.type == "cuda" and self.format.has_kernel(self.rounded):
            return self.format.on_device(jobs, device, self.rounded is not None)
        return TorchEncoder(jobs, self._encode)

    def _encode(self, weight: torch.Tensor, *global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exported = weight if self.rounded is None else weight.to(self.rounded)
        return self.format.encode(exported, *global_scale)


@dataclass(frozen=True)
class Codes:
    """The codes of a part: an :class:`..layout.Encoding`.

    Attributes:
        method: how they are made.
        global_scale: of the part's weight, in formats that have one.
    """

    method: WholeBlocks
    global_scale: GlobalScale | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.method.format.code_dtype

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of the weight behind one element."""
        return (1, self.method.format.packed)

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return blocks.scale_shape(view, self.unit)


@dataclass(frozen=True)
class Scales:
    """The scales of a part: an :class:`..layout.Encoding`.

    Attributes:
        method: how they are made.
        global_scale: as :class:`Codes` has it; the same object.
    """

    method: WholeBlocks
    global_scale: GlobalScale | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.method.format.scale_dtype

    @property
    def unit(self) -> tuple[int, int]:
        return self.method.block

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return blocks.scale_shape(view, self.unit)


def to_json(format: Format) -> dict[str, Any]:
    """Plain data for the handshake."""
    plain = asdict(cast(Any, format))
    return {"kind": format.kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}}


def from_json(data: object) -> Format:
    """Inverse of :func:`to_json`.

    Raises:
        ValueError: a format that this version does not know, or malformed data.
    """
    if not isinstance(data, dict) or data.get("kind") not in FORMATS:
        raise ValueError(
            f"{data!r} is no weight format of {', '.join(FORMATS)}; do both sides run the same rlrefit?"
        )
    return decode(FORMATS[data["kind"]], {key: value for key, value in data.items() if key != "kind"})


def code_shape(shape: Sequence[int], format: Format) -> tuple[int, ...]:
    """Shape of the codes of a weight of ``shape``."""
    return blocks.scale_shape(shape, (1, format.packed))


def part_head(box: Box, format: Format) -> tuple[int, int]:
    """Row and column at which a part begins in its first block."""
    (top, _), (left, _) = box
    rows, columns = format.block
    return top % rows, left % columns
