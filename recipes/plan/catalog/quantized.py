"""Models whose linear layers an engine holds in blocks of FP8, in INT4 or in NVFP4, and whose trainer quantizes them as it packs them.

The engine's side is vLLM 0.21's. For block-FP8 checkpoints (``quantization/fp8.py``) there is beside each parameter of codes, of the
unquantized one's shape, one of FP32 scales, ``[n / 128, k / 128]``, of stacked experts with the experts' dimension before. For INT4
(compressed-tensors' W4A16) codes are ``[n, k / 8]`` and scales ``[n, k / group]``, of stacked experts the other way round. For NVFP4
(``quantization/modelopt.py``) codes are ``[n, k / 2]`` and scales ``[n, k / 16]``, and of each weight in a parameter there is a scalar,
``weight_scale_2``, and another one, ``input_scale``, where inputs are quantized; no kernel here computes with that of experts.
Embeddings, output layers, norms, biases and routers stay as they are, as published checkpoints and recipes have them. The trainer's side is what
travels of its unquantized parameters. Of a block of FP8 that several parts cut, each rank that holds one sends the scale; a weight of which a
part cuts a group of INT4 takes the misc path; training in NVFP4 refuses parts that cut its blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ....integration.layout import Box, Fragment
from ....integration.quantize.blocks import scale_box, scale_shape
from ....integration.quantize.formats import Fp8Blockwise, Int4, Nvfp4
from ....integration.quantize.nvfp4_checkpoint import packed_names
from ....integration.weights.manifest import TensorSpec
from ....integration.weights.quantizing import encoded_fragments, packed_specs, wire_specs
from .attention_units import QueryKeyValue
from .expert_units import Experts
from .fsdp_units import fsdp_params
from .sections import Architecture, CatalogError, Section
from .storage import Index, Param, Part, Weight
from .units import ROUTER, Division, Matrix, Mesh, Place, Stacked, Unit

QuantizedFormat = Fp8Blockwise | Int4 | Nvfp4
# Families whose quantized parameters the tests hold against vLLM's own, by kinds of formats.
_QUANTIZED_FAMILIES = {
    Fp8Blockwise.kind: ("deepseek_v3", "kimi_k2", "llama", "qwen2", "qwen3", "qwen3_moe"),
    Int4.kind: ("deepseek_v3", "kimi_k2", "llama", "qwen2", "qwen3", "qwen3_moe"),
    # Marlin puts biases in another order, so that Qwen2's projections with them take the misc path.
    Nvfp4.kind: ("llama", "qwen3", "qwen3_moe"),
}
_NAMES = {Fp8Blockwise.kind: "blocks of FP8", Int4.kind: "INT4", Nvfp4.kind: "NVFP4"}


def option_of(format: QuantizedFormat | None, activations: bool = False) -> str:
    """What ``rlrefit plan`` calls it."""
    if isinstance(format, Nvfp4):
        return "w4a4" if activations else "w4a16"
    if format is None:
        return "off"
    return "int4" if isinstance(format, Int4) else "fp8"


def travelling_specs(spec: TensorSpec, format: QuantizedFormat, activations: bool) -> tuple[TensorSpec, ...]:
    """What travels in a weight's place, as :attr:`.model.Model.quantize` and ``activations`` have it."""
    return packed_specs(spec, activations) if format.has_global_scale else wire_specs(spec, format)


class _BlockCut(ValueError):
    """A place in which vLLM would refuse to hold a weight in blocks, or a trainer to train it; says which and why."""


@dataclass(frozen=True)
class Quantized:
    """Quantized linear layers: a unit of codes and scales around one of weights."""

    unit: Unit
    format: QuantizedFormat
    activations: bool

    def weights(self) -> Iterator[Weight]:
        for weight in self.unit.weights():
            spec = TensorSpec(weight.name, weight.shape, weight.dtype or self.format.made_of[0])
            for made in travelling_specs(spec, self.format, self.activations):
                yield Weight(made.name, made.shape, made.dtype)

    def train(self, place: Place) -> Iterator[Param]:
        return _travelling(self.unit.train(place), self.format, self.activations)

    def fsdp(self, place: Place) -> Iterator[Param]:
        """What travels of a rank under FSDP2."""
        return _travelling(fsdp_params(self.unit, place), self.format, self.activations)

    def gen(self, place: Place) -> Iterator[Param]:
        """vLLM's parameters of one rank.

        Raises:
            _BlockCut: vLLM refuses them.
        """
        for param in self.unit.gen(place):
            _check_blocks(param, self.format, "vLLM holds")
            yield _stored(param, self.format, self.format.code_name_end, (1, self.format.packed))
            yield _stored(param, self.format, self.format.scale_name_end, self.format.block)
            for kind in _scalars(self.format, self.activations):
                if kind != "input_scale" or len(param.shape) == 2:  # not of experts
                    yield _stored_scalars(param, kind)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return self.unit.train_divisions(sizes)

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return self.unit.gen_divisions(sizes)

    def gen_cuts(self, place: Place) -> Iterator[str]:
        """Why vLLM can't hold the unit's parameters so in one place, one sentence each."""
        return _cuts(self.unit.gen(place), self.format, "vLLM holds")

    def train_cuts(self, place: Place) -> Iterator[str]:
        """Why Megatron can't train them so, one sentence each."""
        if self.format.has_global_scale:
            yield from _cuts(self.unit.train(place), self.format, "training has")


def quantized(
    architecture: Architecture, family: str, format: QuantizedFormat, activations: bool = False
) -> Architecture:
    """The same model with the linear layers of its decoder layers in a format, and their inputs where ``activations`` is true.

    Raises:
        CatalogError: how vLLM holds this family in it is not known, or a weight's rows are no multiple of its groups.
    """
    known = _QUANTIZED_FAMILIES[format.kind]
    if family not in known:
        raise CatalogError(
            f"how vLLM holds a {family} model in {_NAMES[format.kind]} is not in the catalogue, only {', '.join(known)}; leave "
            f"--quantize {option_of(format, activations)} out"
        )
    # Layers of one kind stay one object.
    made: dict[int, tuple[Unit, ...]] = {}
    sections: list[Section] = []
    for section in architecture.sections:
        if isinstance(section.gen, int):
            units = made.setdefault(
                id(section.units), tuple(_quantized(unit, format, activations) for unit in section.units)
            )
            section = replace(section, units=units)
        sections.append(section)
    return replace(architecture, sections=tuple(sections))


def quantized_names(architecture: Architecture) -> set[str]:
    """Hugging Face names of the weights that are quantized."""
    return {
        hf + weight.name for hf, layers in quantized_layers(architecture) for weight in layers.unit.weights()
    }


def travelling_names(architecture: Architecture) -> set[str]:
    """Names of what travels in their place."""
    return {hf + weight.name for hf, layers in quantized_layers(architecture) for weight in layers.weights()}


def quantized_layers(architecture: Architecture) -> Iterator[tuple[str, Quantized]]:
    """Units of quantized layers, with the prefix of their Hugging Face names."""
    for section in architecture.sections:
        for unit in section.units:
            if isinstance(unit, Quantized):
                yield section.hf, unit


def _quantized(unit: Unit, format: QuantizedFormat, activations: bool) -> Unit:
    match unit:
        case Matrix():
            linear = len(unit.shape) == 2 and unit.train_refused != ROUTER
        case QueryKeyValue():
            linear = unit.kind == "weight"
        case _:
            linear = isinstance(unit, Stacked | Experts)
    if not linear:
        return unit
    for weight in unit.weights():
        # Codes of a byte may leave a block half full.
        if format.packed > 1 and weight.shape[-1] % format.block[1]:
            raise CatalogError(
                f"{weight.name} has rows of {weight.shape[-1]} elements, and {_NAMES[format.kind]} shares a scale among {format.block[1]}, as "
                f"engines hold it; leave --quantize {option_of(format, activations)} out"
            )
    return Quantized(unit, format, activations)


def _travelling(params: Iterable[Param], format: QuantizedFormat, activations: bool) -> Iterator[Param]:
    """Codes and scales of a trainer's parameters; ``index`` is still that of the parameter which they are made of, but of scalars."""
    sent: dict[str, list[Box]] = defaultdict(list)
    scalars = _scalars(format, activations)
    for param in params:
        codes: list[Part] = []
        scales: list[Part] = []
        refused = dict.fromkeys(param.refused)
        reason = param.reason
        for part in param.parts:
            view = torch.empty([stop - start for start, stop in part.box], dtype=param.dtype, device="meta")
            fragment = Fragment(part.name, part.full_shape, part.box, view)
            made = encoded_fragments(fragment, format, view.device, sent[part.name])
            if isinstance(made, str):
                refused[part.name], reason = None, made
                continue
            own, *beside = (Part(one.name, one.full_shape, one.box, part.index) for one in made)
            codes.append(own)
            scales += beside
            sent[part.name] += [one.box for one in beside]
        for parts, suffix, dtype in (
            (codes, format.code_name_end, format.code_dtype),
            (scales, format.scale_name_end, format.scale_dtype),
        ):
            names = tuple(name + suffix for name in refused)
            yield Param(param.name + suffix, param.shape, dtype, tuple(parts), names, reason)
        of_weights = dict.fromkeys(part.name for part in codes)
        for kind in scalars:
            parts = [Part(_scalar(name, kind), (), (), (i,)) for i, name in enumerate(of_weights)]
            names = tuple(_scalar(name, kind) for name in refused)
            yield Param(f"{param.name}.{kind}", (len(parts),), torch.float32, tuple(parts), names, reason)


def _scalars(format: QuantizedFormat, activations: bool) -> tuple[str, ...]:
    """Which scalars travel beside a weight."""
    if not format.has_global_scale:
        return ()
    return ("weight_scale_2", "input_scale") if activations else ("weight_scale_2",)


def _scalar(weight: str, kind: str) -> str:
    """The Hugging Face name of a scalar of a weight."""
    name: str = getattr(packed_names(weight), kind)
    return name


def _cuts(params: Iterable[Param], format: QuantizedFormat, who: str) -> Iterator[str]:
    for param in params:
        try:
            _check_blocks(param, format, who)
        except _BlockCut as cut:
            yield str(cut)


def _check_blocks(param: Param, format: QuantizedFormat, who: str) -> None:
    """Check that each part of a parameter of unquantized weights is of whole blocks.

    Raises:
        _BlockCut: one cuts a block, which vLLM refuses to build, refits to write, or training to compute with.
    """
    for part in param.parts:
        within = part.index[-2:]
        for (start, stop), n, place, b in zip(part.box, part.full_shape, within, format.block, strict=True):
            assert isinstance(place, slice), "matrices stand in the last two dimensions of their parameter"
            if start % b or (stop % b and stop < n) or place.start % b:
                raise _BlockCut(
                    f"{who} {param.name} in blocks of {' by '.join(map(str, format.block))} only where each of its "
                    f"parts is a multiple of them, and of the {n} of {part.name} it would have {stop - start}"
                )


def _stored(param: Param, format: QuantizedFormat, suffix: str, block: tuple[int, int]) -> Param:
    """vLLM's parameter of codes or scales in the place of ``param``, an element for each ``block`` of rows and columns."""
    # vLLM has INT4 experts the other way round.
    turned = isinstance(format, Int4) and len(param.shape) == 3
    parts = []
    for part in param.parts:
        rows, columns = (_blocks(place, b) for place, b in zip(part.index[-2:], block, strict=True))
        index: Index = (*part.index[:-2], *((columns, rows) if turned else (rows, columns)))
        full, box = scale_shape(part.full_shape, block), scale_box(part.box, block)
        parts.append(Part(part.name + suffix, full, box, index, turned=turned))
    height, width = scale_shape(param.shape, block)[-2:]
    return Param(
        param.name + suffix,
        (*param.shape[:-2], *((width, height) if turned else (height, width))),
        format.code_dtype if suffix == format.code_name_end else format.scale_dtype,
        tuple(parts),
        tuple(name + suffix for name in param.refused),
        param.reason,
    )


def _stored_scalars(param: Param, kind: str) -> Param:
    """vLLM's parameter of the scalars of the weights in ``param``: ``[weights]``, of stacked experts ``[experts, weights]``, or ``[experts]``
    where an expert has one weight in it."""
    experts = param.shape[:-2]
    weights = dict.fromkeys((part.name, part.index[:-2]) for part in param.parts)
    each = len(weights) // (experts[0] if experts else 1)
    alone = bool(experts) and each == 1
    parts = []
    for number, (name, expert) in enumerate(weights):
        index: Index = expert if alone else (*expert, number % each)
        parts.append(Part(_scalar(name, kind), (), (), index))
    own = param.name.removesuffix("weight") + kind
    refused = tuple(_scalar(name, kind) for name in param.refused)
    shape = experts if alone else (*experts, each)
    return Param(own, shape, torch.float32, tuple(parts), refused, param.reason)


def _blocks(place: int | slice | None, block: int) -> slice:
    assert isinstance(place, slice), "matrices stand in the last two dimensions of their parameter"
    return slice(place.start // block, -(-place.stop // block))
