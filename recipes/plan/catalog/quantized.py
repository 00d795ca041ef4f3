"""Models whose linear layers an engine holds in blocks of FP8, and whose trainer quantizes them as it packs them.

The engine's side is vLLM 0.21's for block-FP8 checkpoints (``quantization/fp8.py``): beside each parameter of codes, of
the unquantized one's shape, stands one of FP32 scales, ``[n / 128, k / 128]``, of stacked experts with the experts'
dimension before. Embeddings, output layers, norms, biases and routers stay as they are, as published block-FP8
checkpoints have them. The trainer's side is what travels of its unquantized parameters; of a block that several parts cut, each rank
that holds one sends the scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ....integration.layout import Box, Fragment
from ....integration.quantize.blocks import scale_box, scale_shape
from ....integration.quantize.formats import Fp8Blockwise
from ....integration.weights.quantizing import encoded_fragments
from .attention_units import QueryKeyValue
from .expert_units import Experts
from .fsdp_units import fsdp_params
from .sections import Architecture, CatalogError, Section
from .storage import Index, Param, Part, Weight
from .units import ROUTER, Division, Matrix, Mesh, Place, Stacked, Unit

# Families whose block-FP8 parameters the tests hold against vLLM's own.
_QUANTIZED_FAMILIES = ("deepseek_v3", "kimi_k2", "llama", "qwen2", "qwen3", "qwen3_moe")


class _BlockCut(ValueError):
    """A place in which vLLM would refuse to hold a weight in blocks; says which and why."""


@dataclass(frozen=True)
class Quantized:
    """Linear layers in FP8 blocks: a unit of codes and scales around one of weights."""

    unit: Unit
    format: Fp8Blockwise

    def weights(self) -> Iterator[Weight]:
        for weight in self.unit.weights():
            yield weight._replace(dtype=torch.float8_e4m3fn)
            shape = scale_shape(weight.shape, self.format.block)
            yield Weight(weight.name + self.format.scale_name_end, shape, self.format.scale_dtype)

    def train(self, place: Place) -> Iterator[Param]:
        return _travelling(self.unit.train(place), self.format)

    def fsdp(self, place: Place) -> Iterator[Param]:
        """What travels of a rank under FSDP2."""
        return _travelling(fsdp_params(self.unit, place), self.format)

    def gen(self, place: Place) -> Iterator[Param]:
        """vLLM's parameters of one rank.

        Raises:
            _BlockCut: vLLM refuses them.
        """
        for param in self.unit.gen(place):
            yield replace(param, dtype=torch.float8_e4m3fn)
            yield _scales(param, self.format)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return self.unit.train_divisions(sizes)

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return self.unit.gen_divisions(sizes)

    def cuts(self, place: Place) -> Iterator[str]:
        """Why vLLM can't hold the unit's parameters so in one place, one sentence each."""
        for param in self.unit.gen(place):
            try:
                _scales(param, self.format)
            except _BlockCut as cut:
                yield str(cut)


def quantized(architecture: Architecture, family: str, format: Fp8Blockwise) -> Architecture:
    """The same model with the linear layers of its decoder layers in blocks.

    Raises:
        CatalogError: how vLLM holds this family in blocks is not known.
    """
    if family not in _QUANTIZED_FAMILIES:
        raise CatalogError(
            f"how vLLM holds a {family} model in blocks of FP8 is not in the catalogue, only "
            f"{', '.join(_QUANTIZED_FAMILIES)}; leave --quantize fp8 out"
        )
    # Layers of one kind stay one object.
    made: dict[int, tuple[Unit, ...]] = {}
    sections: list[Section] = []
    for section in architecture.sections:
        if isinstance(section.gen, int):
            units = made.setdefault(
                id(section.units), tuple(_quantized(unit, format) for unit in section.units)
            )
            section = replace(section, units=units)
        sections.append(section)
    return replace(architecture, sections=tuple(sections))


def quantized_names(architecture: Architecture) -> set[str]:
    """Hugging Face names of the weights that stand in blocks."""
    return {
        section.hf + weight.name
        for section in architecture.sections
        for unit in section.units
        if isinstance(unit, Quantized)
        for weight in unit.unit.weights()
    }


def _quantized(unit: Unit, format: Fp8Blockwise) -> Unit:
    match unit:
        case Matrix():
            linear = len(unit.shape) == 2 and unit.train_refused != ROUTER
        case QueryKeyValue():
            linear = unit.kind == "weight"
        case _:
            linear = isinstance(unit, Stacked | Experts)
    return Quantized(unit, format) if linear else unit


def _travelling(params: Iterable[Param], format: Fp8Blockwise) -> Iterator[Param]:
    """Codes and scales of a trainer's parameters; ``index`` is still that of the parameter which they are made of."""
    sent: dict[str, list[Box]] = defaultdict(list)
    for param in params:
        codes: list[Part] = []
        scales: list[Part] = []
        for part in param.parts:
            view = torch.empty([stop - start for start, stop in part.box], dtype=param.dtype, device="meta")
            fragment = Fragment(part.name, part.full_shape, part.box, view)
            made = encoded_fragments(fragment, format, view.device, sent[part.name])
            assert not isinstance(made, str), "of blocks of FP8 parts can be made, whatever they cut"
            own, *beside = (Part(one.name, one.full_shape, one.box, part.index) for one in made)
            codes.append(own)
            scales += beside
            sent[part.name] += [one.box for one in beside]
        for parts, suffix, dtype in (
            (codes, "", torch.float8_e4m3fn),
            (scales, format.scale_name_end, format.scale_dtype),
        ):
            names = tuple(name + suffix for name in param.refused)
            yield replace(param, name=param.name + suffix, dtype=dtype, parts=tuple(parts), refused=names)


def _scales(param: Param, format: Fp8Blockwise) -> Param:
    """The parameter of scales that vLLM keeps beside ``param``.

    Raises:
        _BlockCut: a part of ``param`` cuts a block, which vLLM refuses to build.
    """
    parts = []
    for part in param.parts:
        within = part.index[-2:]
        for (start, stop), n, place, b in zip(part.box, part.full_shape, within, format.block, strict=True):
            assert isinstance(place, slice), "matrices stand in the last two dimensions of their parameter"
            if start % b or (stop % b and stop < n) or place.start % b:
                raise _BlockCut(
                    f"vLLM holds {param.name} in blocks of {' by '.join(map(str, format.block))} only where each of its "
                    f"parts is a multiple of them, and of the {n} of {part.name} it would have {stop - start}"
                )
        index: Index = (*part.index[:-2], *(_blocks(s, b) for s, b in zip(within, format.block, strict=True)))
        parts.append(
            Part(
                part.name + format.scale_name_end,
                scale_shape(part.full_shape, format.block),
                scale_box(part.box, format.block),
                index,
            )
        )
    return Param(
        param.name + format.scale_name_end,
        scale_shape(param.shape, format.block),
        format.scale_dtype,
        tuple(parts),
        tuple(name + format.scale_name_end for name in param.refused),
        param.reason,
    )


def _blocks(place: int | slice, block: int) -> slice:
    assert isinstance(place, slice), "matrices stand in the last two dimensions of their parameter"
    return slice(place.start // block, -(-place.stop // block))
