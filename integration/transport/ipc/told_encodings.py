"""Encodings as plain data: what a receiver that reads a sender's memory has to make of it on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...control.decoding import decode
from ...layout import Encoding
from ...packing import Cast, NotComputable
from ...packing.encoded import PackedEncoding
from ...quantize.formats import Codes, Scales, WholeBlocks, from_json, to_json
from ...quantize.jobs import GlobalScale
from ...weights.manifest import dtype_name, dtype_of

_CAST, _CODES, _SCALES = "cast", "codes", "scales"
_BLOCKS: dict[str, type[Codes] | type[Scales]] = {_CODES: Codes, _SCALES: Scales}


@dataclass(frozen=True)
class ToldEncoding:
    """An encoding, and the type of what is encoded."""

    encoding: PackedEncoding
    held: torch.dtype

    @property
    def has_global_scale(self) -> bool:
        """Whether it lacks a global scale, which a receiver reads where the sender has it."""
        return isinstance(self.encoding, Codes | Scales) and self.encoding.method.format.has_global_scale

    def under(self, global_scale: torch.Tensor) -> PackedEncoding:
        """The encoding by a global scale, which lies in the sender's memory."""
        assert isinstance(self.encoding, Codes | Scales), "casts have no scales"
        return replace(self.encoding, global_scale=GlobalScale(global_scale))


@dataclass(frozen=True)
class _Told:
    """As it travels: ``format`` and ``rounded`` are of codes and scales, ``dtype`` of a cast."""

    kind: str
    held: str
    dtype: str = ""
    format: object = None
    rounded: str = ""


def told(encoding: Encoding, held: torch.dtype) -> dict[str, object]:
    """An encoding of memory of type ``held`` as plain data.

    Raises:
        NotComputable: what it makes depends on more than the memory that a receiver reads.
    """
    if isinstance(encoding, Cast):
        return {"kind": _CAST, "held": dtype_name(held), "dtype": dtype_name(encoding.dtype)}
    if isinstance(encoding, Codes | Scales):
        method = encoding.method
        return {
            "kind": _CODES if isinstance(encoding, Codes) else _SCALES,
            "held": dtype_name(held),
            "format": to_json(method.format),
            "rounded": "" if method.rounded is None else dtype_name(method.rounded),
        }
    raise NotComputable(
        "a trainer rank holds parts of its blocks, whose scales it makes with other ranks in each refit, so that no receiver can "
        "quantize what it reads"
    )


def global_scale_of(encoding: Encoding) -> torch.Tensor | None:
    """What an encoding reads beside a weight: FP32 scalar; None if nothing."""
    if isinstance(encoding, Codes | Scales) and encoding.global_scale is not None:
        return encoding.global_scale.value
    return None


def heard(data: object) -> ToldEncoding:
    """Inverse of :func:`told`; nothing in ``data`` is trusted.

    Raises:
        ValueError: this version does not know it, or it is malformed.
    """
    one = decode(_Told, data)
    held = dtype_of(one.held)
    if one.kind == _CAST:
        return ToldEncoding(Cast(dtype_of(one.dtype)), held)
    if one.kind not in _BLOCKS:
        raise ValueError(f"{one.kind!r} is no encoding that receivers know")
    method = WholeBlocks(from_json(one.format), dtype_of(one.rounded) if one.rounded else None)
    return ToldEncoding(_BLOCKS[one.kind](method), held)
