"""What a source sends: of a fragment its view's bytes, or what is computed of them while they are packed; of a weight codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import EncodedView, make_copy
from rlrefit.integration.quantize.formats import Format, wire_names


def as_sent(fragment: Fragment) -> torch.Tensor:
    """A copy of a CPU fragment as it leaves."""
    sizes = tuple(stop - start for start, stop in fragment.box)
    source: Any = fragment.view
    if fragment.encoding is not None:
        encoding: Any = fragment.encoding
        source = EncodedView(fragment.view, encoding, tuple((0, n) for n in sizes))
    packed = torch.empty(sizes, dtype=fragment.dtype)
    make_copy([(source, packed)], torch.device("cpu")).launch()
    return packed


def encoded(tensors: Mapping[str, torch.Tensor], formats: Mapping[str, Format]) -> dict[str, torch.Tensor]:
    """Full tensors, with codes and scales in the place of those that have a format."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        format = formats.get(name)
        if format is None:
            found[name] = tensor
        else:
            found |= zip(wire_names(name, format), format.encode(tensor), strict=True)
    return found
