"""What quantized weights travel as, and a trainer rank that quantizes what it sends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence

import torch

from ..layout import Box, Fragment, local_slice, subtract_all
from ..packing import Cast
from ..quantize import blocks, nvfp4
from ..quantize.formats import Codes, Format, Scales, WholeBlocks, code_shape, part_head, wire_names
from ..quantize.nvfp4_checkpoint import packed_names
from ..quantize.partial_blocks import PartialCodes
from .endpoints import (
    HoldsQuantized,
    WeightSource,
    gives_memory_back,
    prepares_alone,
    sent_formats,
    trained_formats,
)
from .manifest import TensorSpec, dtype_name

# In the reason of a weight that takes the misc path for it.
CUTS_BLOCKS = "which cuts blocks of"


def _scales_spec(spec: TensorSpec, format: Format) -> TensorSpec:
    """The scales that travel beside a weight."""
    _, name = wire_names(spec.name, format)
    return TensorSpec(name, blocks.scale_shape(spec.shape, format.block), format.scale_dtype)


def wire_specs(spec: TensorSpec, format: Format) -> tuple[TensorSpec, TensorSpec]:
    """What travels in a weight's place: its codes and its scales.

    Raises:
        ValueError: the weight can't be held in the format; says why.
    """
    if format.has_global_scale:
        raise ValueError(
            f"{spec.name} would have to come in {format.kind}, whose global scales none but training for it makes (docs/nvfp4.md)"
        )
    if len(spec.shape) != 2 or spec.dtype not in format.made_of:
        raise ValueError(
            f"{spec.name} is {dtype_name(spec.dtype)}{list(spec.shape)}; {format.kind} is made of matrices in "
            f"{' or '.join(map(dtype_name, format.made_of))}"
        )
    codes, _ = wire_names(spec.name, format)
    return TensorSpec(codes, code_shape(spec.shape, format), format.code_dtype), _scales_spec(spec, format)


def unfit(fragment: Fragment) -> str:
    """Why no format can be made of a held part of a weight as it is packed, or an empty string."""
    if fragment.axes is not None and not fragment.axes.plain:
        return "a rank holds its elements in another order than rows and columns, of which blocks are made"
    if fragment.encoding is not None and not isinstance(fragment.encoding, Cast):
        return "a rank computes it while packing, and what is computed is not quantized in the same pass"
    return ""


def encoded_fragments(
    fragment: Fragment, format: Format, device: torch.device, taken: Sequence[Box] = ()
) -> list[Fragment] | str:
    """What this rank sends of a held part of a weight.

    Args:
        fragment: not encoded, or by a :class:`..packing.Cast`.
        format: in which the weight travels.
        device: that makes it; the scales of blocks that the part cuts lie there.
        taken: boxes of the scales that this rank sends of other parts of the weight.

    Returns:
        Its codes, then its scales, those that are not taken yet; or why no rank can make them of its part.
    """
    cast = fragment.encoding
    rounded = cast.dtype if isinstance(cast, Cast) else None
    code_name, scale_name = wire_names(fragment.name, format)
    scale_box = blocks.scale_box(fragment.box, format.block)
    scale_shape = blocks.scale_shape(fragment.full_shape, format.block)
    if not blocks.straddled(fragment.box, fragment.full_shape, format.block):
        method = WholeBlocks(format, rounded)
        encoding = Codes(method)
        shape, box = code_shape(fragment.full_shape, format), blocks.scale_box(fragment.box, encoding.unit)
        return [
            Fragment(code_name, shape, box, fragment.view, encoding),
            Fragment(scale_name, scale_shape, scale_box, fragment.view, Scales(method)),
        ]
    partial = format.partial_blocks(rounded)
    if partial is None:
        return (
            f"a rank holds {_ranges(fragment)}, {CUTS_BLOCKS} {' by '.join(map(str, format.block))}: it does not know "
            "their maxima, so the whole weight is quantized"
        )
    size = [stop - start for start, stop in scale_box]
    # NaN until all ranks have made them: codes made too early show.
    scales = torch.full(size, float("nan"), dtype=format.scale_dtype, device=device)
    codes = PartialCodes(partial, part_head(fragment.box, format), scales)
    return [
        Fragment(code_name, fragment.full_shape, fragment.box, fragment.view, codes),
        *(
            Fragment(scale_name, scale_shape, box, scales[local_slice(scale_box, box)])
            for box in subtract_all(scale_box, taken)
        ),
    ]


def packed_specs(spec: TensorSpec, activations: bool = True) -> tuple[TensorSpec, ...]:
    """What stands in a weight's place, on the wire and in a checkpoint.

    Args:
        spec: ``[n, k]``.
        activations: whether there is an ``input_scale``.

    Raises:
        ValueError: the weight has no such form; says why.
    """
    if len(spec.shape) != 2 or spec.shape[1] % nvfp4.BLOCK:
        raise ValueError(
            f"{spec.name} is {list(spec.shape)}; NVFP4 takes matrices whose rows are a multiple of {nvfp4.BLOCK} "
            "elements. Leave it in BF16"
        )
    n, k = spec.shape
    names = packed_names(spec.name)
    found = (
        TensorSpec(names.weight, (n, k // 2), torch.uint8),
        TensorSpec(names.weight_scale, (n, k // nvfp4.BLOCK), torch.float8_e4m3fn),
        TensorSpec(names.weight_scale_2, (), torch.float32),
    )
    return (*found, TensorSpec(names.input_scale, (), torch.float32)) if activations else found


def packed_in(specs: Sequence[TensorSpec]) -> frozenset[str]:
    """Names of codes and block scales of :func:`packed_specs` among all that travels."""
    kinds = {spec.name: spec.dtype for spec in specs}
    found: set[str] = set()
    for name, dtype in kinds.items():
        if dtype == torch.uint8 and name.endswith(".weight"):
            names = packed_names(name)
            if names.weight_scale in kinds and names.weight_scale_2 in kinds:
                found |= {names.weight, names.weight_scale}
    return frozenset(found)


class QuantizingSource:
    """Implements :class:`.endpoints.WeightSource`: codes and scales stand where their weight stood.

    What a rank holds is quantized as it is packed, block by block, with the bytes that the full tensor would
    have. Where it holds less than a block, its scale is made by all holders (:mod:`..engine.shared_scales`) before; in a format
    that can't be made so, the weight takes the misc path and is quantized in full.

    Args:
        source: of unquantized weights.
        formats: Hugging Face name of a weight → the format in which the engine stores it.
    """

    def __init__(self, source: WeightSource, formats: Mapping[str, Format]):
        self._source = source
        self._formats = dict(formats)
        self._dtypes = {spec.name: spec.dtype for spec in source.specs()}
        self._specs: list[TensorSpec] = []
        self._weight_of: dict[str, str] = {}
        for spec in source.specs():
            format = self._formats.get(spec.name)
            travelling = [spec] if format is None else wire_specs(spec, format)
            self._specs += travelling
            self._weight_of.update(dict.fromkeys((s.name for s in travelling), spec.name))

    @property
    def device(self) -> torch.device:
        return self._source.device

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def prepare(self) -> None:
        self._source.prepare()

    def storage_key(self) -> Hashable:
        return self._source.storage_key()

    @property
    def gives_memory_back(self) -> bool | None:
        return gives_memory_back(self._source)

    @property
    def prepares_alone(self) -> bool:
        return prepares_alone(self._source)

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        return trained_formats(self._source)

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return {**sent_formats(self._source), **self._formats}

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, told = self._source.fragments()
        refused = dict(told)  # which may be the source's own
        found: list[Fragment] = []
        sent: dict[str, list[Box]] = defaultdict(list)
        kept: frozenset[str] = frozenset()
        source: object = self._source
        if isinstance(source, HoldsQuantized):
            found, misfits, kept = source.quantized_fragments(self._formats)
            # The source itself refuses what is no plain memory.
            refused = {name: reason for name, reason in refused.items() if name not in kept} | misfits
        for fragment in held:
            if fragment.name in kept:
                continue
            format = self._formats.get(fragment.name)
            if format is None:
                found.append(fragment)
                continue
            encoded = self._encoded(fragment, format, sent[fragment.name])
            if isinstance(encoded, str):
                refused.setdefault(fragment.name, encoded)
                continue
            found += encoded
            _, *scales = encoded
            sent[fragment.name] += [part.box for part in scales]
        for name, format in self._formats.items():
            if name in refused:
                refused.update(dict.fromkeys(wire_names(name, format), refused[name]))
                if name not in wire_names(name, format):
                    del refused[name]
        return found, refused

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(names)
        weights = list(dict.fromkeys(self._weight_of[name] for name in names))
        for name, weight in self._source.export(weights):
            format = self._formats.get(name)
            if format is None:
                yield name, weight
                continue
            for travelling, tensor in zip(wire_names(name, format), format.encode(weight), strict=True):
                if travelling in wanted:
                    yield travelling, tensor

    def _encoded(self, fragment: Fragment, format: Format, sent: Sequence[Box]) -> list[Fragment] | str:
        if fragment.dtype != self._dtypes[fragment.name]:
            return (
                f"a rank sends it as {dtype_name(fragment.dtype)}, the export is "
                f"{dtype_name(self._dtypes[fragment.name])}"
            )
        return unfit(fragment) or encoded_fragments(fragment, format, self.device, sent)


async def quant_weights_by_name(
    source: WeightSource, formats: Mapping[str, Format], names: Sequence[str] | None = None
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Full tensors for engines whose contract they are: codes and scales one after the other, the rest as it is.

    A collective of all trainer ranks, one weight at a time; other tasks of the event loop run between two weights.
    Parameters that the trainer itself keeps quantized come by its unquantized export, and are quantized anew.

    Args:
        source: of unquantized weights.
        formats: Hugging Face name of a weight → the format in which the engine stores it. vLLM's workers tell theirs by
            ``refit_formats`` of ``VllmRefitExtension``, as plain data for :func:`..quantize.formats.from_json`; in the process
            ``quantized(specs)`` of a destination does. INT4's scales are made by its ``scale_rule``, of which engines do not know:
            :func:`..quantize.formats.as_made` gives it the trainer's.
        names: of unquantized weights; all if left out.

    Yields:
        Name and tensor; of what is quantized the codes, ``float8_e4m3fn`` ``[n, k]`` under the weight's name or INT4's packed ones
        under their own, then its scales.

    Raises:
        ValueError: a weight can't be held in its format.
    """
    quantizing = QuantizingSource(source, formats)
    chosen = [spec.name for spec in source.specs()] if names is None else list(names)
    wanted: list[str] = []
    for name in chosen:
        wanted += wire_names(name, formats[name]) if name in formats else [name]
    for name, tensor in quantizing.export(wanted):
        yield name, tensor
        await asyncio.sleep(0)


def _ranges(fragment: Fragment) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in fragment.box)
