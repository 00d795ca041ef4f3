"""True codes and scales of weights that an engine holds in blocks, made anew of the weights' true values.

As :mod:`.values`: whole blocks are computed and quantized on the engine's side, whatever the trainers sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import batched

import torch

from ...integration.layout import Box, Fragment, local_slice
from ...integration.quantize.blocks import scale_box
from ...integration.quantize.formats import Format
from ...integration.weights.manifest import TensorSpec
from . import values

# Elements quantized at once; bounds the temporary memory at some hundred MiB.
_CHUNK = 1 << 24


def wrong(
    held: Mapping[str, Sequence[Fragment]],
    specs: Mapping[str, TensorSpec],
    formats: Mapping[str, Format],
    version: int,
    changes: Sequence[values.Change] = (),
) -> list[Fragment]:
    """The fragments of codes and scales that differ in any bit from what quantizing the true values gives.

    Args:
        held: Hugging Face name → what an engine rank holds, of codes and of scales.
        specs: of the weights, before they are quantized.
        formats: weight → how it is held.
        version: of the true values.
        changes: that were made to it.
    """
    groups: dict[tuple[Format, torch.dtype, tuple[int, ...], Box], list[tuple[str, Fragment, Fragment]]] = {}
    for name, format in formats.items():
        scales = {fragment.box: fragment for fragment in held.get(name + format.scale_name_end, ())}
        for codes in held.get(name, ()):
            key = format, specs[name].dtype, tuple(codes.full_shape), codes.box
            found = specs[name].name, codes, scales[scale_box(codes.box, format.block)]
            groups.setdefault(key, []).append(found)
    flags: list[torch.Tensor] = []
    owners: list[Fragment] = []
    for (format, dtype, shape, whole), members in groups.items():
        for box in _strips(whole, format.block[0]):
            (top, bottom), (left, right) = box
            # Alike weights at once: a model's experts are tens of thousands of small ones.
            for some in batched(members, max(1, _CHUNK // max(1, (bottom - top) * (right - left)))):
                names, codes_of, scales_of = zip(*some, strict=True)
                true = values.stacked(names, shape, box, dtype, codes_of[0].view.device, version, changes)
                boxes = box, scale_box(box, format.block)
                for fragments, part, expected in zip(
                    (codes_of, scales_of), boxes, format.encode(true), strict=True
                ):
                    bits = torch.stack([values.bits(f.view)[local_slice(f.box, part)] for f in fragments])
                    flags.append((bits != values.bits(expected)).flatten(1).any(1))
                    owners += fragments
    if not flags:
        return []
    found_wrong = torch.cat(flags).nonzero().flatten().tolist()
    return list({id(owners[i]): owners[i] for i in found_wrong}.values())


def _strips(box: Box, rows: int) -> Iterator[Box]:
    """Rows of whole blocks; an engine's parts begin where blocks do."""
    (start, stop), columns = box
    step = max(1, _CHUNK // (rows * max(1, columns[1] - columns[0]))) * rows
    for first in range(start, stop, step):
        yield (first, min(first + step, stop)), columns
