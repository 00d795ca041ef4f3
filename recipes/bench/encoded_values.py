"""True codes and scales of weights that an engine holds in blocks, made anew of the weights' true values.

As :mod:`.values`: whole blocks are computed and quantized on the engine's side, whatever the trainers sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...integration.layout import Box, Fragment, local_slice
from ...integration.manifest import TensorSpec
from ...integration.quantize.blocks import scale_box
from ...integration.quantize.formats import Format
from . import values

# Elements quantized at once; bounds the temporary memory at some hundred MiB.
_CHUNK = 1 << 24


def wrong(
    held: Mapping[str, Sequence[Fragment]],
    specs: Mapping[str, TensorSpec],
    formats: Mapping[str, Format],
    version: int,
) -> list[Fragment]:
    """The fragments of codes and scales that differ in any bit from what quantizing the true values gives.

    Args:
        held: Hugging Face name → what an engine rank holds, of codes and of scales.
        specs: of the weights, before they are quantized.
        formats: weight → how it is held.
        version: of the true values.
    """
    flags: list[torch.Tensor] = []
    owners: list[Fragment] = []
    for name, format in formats.items():
        scales = {fragment.box: fragment for fragment in held.get(name + format.scale_name_end, ())}
        for codes in held.get(name, ()):
            scale = scales[scale_box(codes.box, format.block)]
            for box in _strips(codes, format.block[0]):
                expected = format.encode(_true(specs[name], box, codes.view.device, version))
                boxes = box, scale_box(box, format.block)
                for fragment, part, true in zip((codes, scale), boxes, expected, strict=True):
                    found = values.bits(fragment.view)[local_slice(fragment.box, part)]
                    flags.append((found != values.bits(true)).any())
                    owners.append(fragment)
    if not flags:
        return []
    found = torch.stack(flags).nonzero().flatten().tolist()
    return list({id(owners[i]): owners[i] for i in found}.values())


def _true(spec: TensorSpec, box: Box, device: torch.device, version: int) -> torch.Tensor:
    view = torch.empty([stop - start for start, stop in box], dtype=spec.dtype, device=device)
    values.write([Fragment(spec.name, tuple(spec.shape), box, view)], version)
    return view


def _strips(fragment: Fragment, rows: int) -> Iterator[Box]:
    """Rows of whole blocks; an engine's parts begin where blocks do."""
    (start, stop), columns = fragment.box
    step = max(1, _CHUNK // (rows * max(1, columns[1] - columns[0]))) * rows
    for first in range(start, stop, step):
        yield (first, min(first + step, stop)), columns
