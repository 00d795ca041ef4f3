"""What a source's fragment sends: its view's bytes, or what is computed of them while they are packed."""

from __future__ import annotations

from typing import Any

import torch

from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import EncodedView, make_copy


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
