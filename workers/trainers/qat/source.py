"""A trainer rank as a source of packed NVFP4 weights, shard to shard.

The packed tensors of what this rank holds are kept in memory, 9/16 byte a weight, and made anew before each refit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ....integration.layout import Box, Fragment
from ....integration.packing import Cast
from ....integration.quantize import blocks, nvfp4
from ....integration.quantize.four_bits import Packer, PackJob, make_packer
from ....integration.quantize.nvfp4_checkpoint import packed_names
from ....integration.quantize.nvfp4_table import NVFP4
from ....integration.weights.endpoints import WeightSource, Writes, writes_by
from ....integration.weights.manifest import TensorSpec
from .model import QAT

_BLOCK = (1, nvfp4.BLOCK)


@dataclass(frozen=True, eq=False)
class _Packing:
    """What packs the parts of weights that are exported in one dtype: their jobs, and where their global scales are."""

    dtype: torch.dtype
    packer: Packer
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Scalars:
    """Memory of scalars of one kind, of weights that are exported in one dtype, and where their values are."""

    dtype: torch.dtype
    memory: list[torch.Tensor]
    positions: torch.Tensor

    def write(self, values: torch.Tensor) -> None:
        torch._foreach_copy_(self.memory, list(values.unbind()))


class PackedSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` in place of the source of unquantized weights.

    A shard that cuts no block of 16 columns gives the bytes of a slice of the whole packed weight. Other weights, and
    those that ``source`` refuses, take the misc path, packed.

    Args:
        source: of the unquantized weights, in the engine's dtype.
        qat: of the same model.

    :meth:`prepare` is a collective of all trainer ranks.
    """

    def __init__(self, source: WeightSource, qat: QAT):
        self._source = source
        self._qat = qat
        self._parts: list[tuple[str, PackJob]] = []
        self._scalars: dict[str, torch.Tensor] = {}
        # Prepared for the parts of the last fragments, as :meth:`prepare` needs it.
        self._packings: list[_Packing] | None = None
        self._packed_from: tuple[int, ...] = ()
        self._weight_scalars: list[_Scalars] = []
        self._input_scalars: _Scalars | None = None
        self._memory: dict[tuple[str, Box], torch.Tensor] = {}
        self._specs = [packed for spec in source.specs() for packed in qat.specs(spec)]
        self._dtypes = {spec.name: spec.dtype for spec in source.specs() if spec.name in qat.weights}
        self._origin = {packed.name: spec.name for spec in source.specs() for packed in qat.specs(spec)}

    @property
    def device(self) -> torch.device:
        return self._source.device

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, told = self._source.fragments()
        refused = dict(told)  # which may be the source's own
        for fragment in held:
            if fragment.name in self._qat.weights and (reason := _misfit(fragment)):
                refused[fragment.name] = reason
        packed = [f for f in held if f.name not in self._qat.weights]
        self._parts, self._scalars, self._packings = [], {}, None
        for fragment in held:
            if fragment.name in self._qat.weights and fragment.name not in refused:
                packed += self._pack(fragment)
        return packed, {name: refused[origin] for name, origin in self._origin.items() if origin in refused}

    def prepare(self) -> None:
        self._qat.prepare_export(self._source)
        places = self._places()
        if self._packings is None or self._packed_from != places:
            # An offloaded trainer's weights may have come back elsewhere since fragments were asked for.
            self._packings, self._packed_from = self._prepared(), places
        with torch.no_grad():
            for one in self._packings:
                one.packer.launch(self._qat.scales_at(one.positions, one.dtype).to(self.device))
            for scalars in self._weight_scalars:
                scalars.write(self._qat.scales_at(scalars.positions, scalars.dtype))
            if self._input_scalars is not None:
                self._input_scalars.write(self._qat.input_scales_at(self._input_scalars.positions))

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(names)
        origins = dict.fromkeys(self._origin[name] for name in names)
        for origin, weight in self._source.export(list(origins)):
            for name, tensor in self._qat.packed(origin, weight):
                if name in wanted:
                    yield name, tensor

    def storage_key(self) -> Hashable:
        # Of what is packed, too: fragments may have been asked for where the weights are no longer.
        return self._source.storage_key(), self._places()

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`, of the unquantized weights."""
        return writes_by(self._source)

    def _places(self) -> tuple[int, ...]:
        return tuple([job.source.data_ptr() for _, job in self._parts])

    def _pack(self, fragment: Fragment) -> Iterator[Fragment]:
        rows, columns = fragment.view.shape
        n, k = fragment.full_shape
        (down, (left, right)) = fragment.box
        halves: Box = (down, (left // 2, right // 2))
        of_scales = blocks.scale_box(fragment.box, _BLOCK)
        names = packed_names(fragment.name)
        codes = self._kept(names.weight, halves, (rows, columns // 2), torch.uint8)
        scales = self._kept(
            names.weight_scale, of_scales, (rows, columns // nvfp4.BLOCK), torch.float8_e4m3fn
        )
        self._parts.append((fragment.name, PackJob(fragment.view, codes, scales)))
        yield Fragment(names.weight, (n, k // 2), halves, codes)
        yield Fragment(names.weight_scale, (n, k // nvfp4.BLOCK), of_scales, scales)
        for name in (names.weight_scale_2, names.input_scale):
            if name in self._origin and name not in self._scalars:
                self._scalars[name] = self._kept(name, (), (), torch.float32)
                yield Fragment(name, (), (), self._scalars[name])

    def _kept(self, name: str, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same memory each time: who asked for fragments before reads what :meth:`prepare` writes, as who asks now."""
        if (name, box) not in self._memory:
            self._memory[name, box] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._memory[name, box]

    def _prepared(self) -> list[_Packing]:
        """What packs all parts; and where all scalars are, of weights and of inputs."""
        by_dtype: dict[torch.dtype, list[tuple[str, PackJob]]] = defaultdict(list)
        for name, job in self._parts:
            by_dtype[self._dtypes[name]].append((name, job))
        of_weights: dict[torch.dtype, list[str]] = defaultdict(list)
        of_inputs: list[str] = []
        for name in self._scalars:
            weight = self._origin[name]
            own = name == packed_names(weight).weight_scale_2
            (of_weights[self._dtypes[weight]] if own else of_inputs).append(name)
        self._weight_scalars = [
            self._scalars_of(names, dtype, self._qat.positions) for dtype, names in of_weights.items()
        ]
        self._input_scalars = (
            self._scalars_of(of_inputs, torch.float32, self._qat.input_positions) if of_inputs else None
        )
        return [
            _Packing(
                dtype,
                make_packer(NVFP4, [job for _, job in found], dtype, self.device),
                self._qat.positions([name for name, _ in found]),
            )
            for dtype, found in by_dtype.items()
        ]

    def _scalars_of(
        self, names: Sequence[str], dtype: torch.dtype, positions: Callable[[Sequence[str]], torch.Tensor]
    ) -> _Scalars:
        weights = [self._origin[name] for name in names]
        return _Scalars(dtype, [self._scalars[name] for name in names], positions(weights))


def _misfit(fragment: Fragment) -> str:
    """Why a part can't be packed alone, or an empty string."""
    if fragment.encoding is not None and not isinstance(fragment.encoding, Cast):
        return "a rank computes it while packing, and what is computed is not quantized in the same pass"
    if not blocks.straddled(fragment.box, fragment.full_shape, _BLOCK):
        return ""
    start, stop = fragment.box[1]
    return (
        f"a rank holds columns {start}:{stop}, which cuts blocks of {nvfp4.BLOCK} elements, so the whole weight is "
        "packed"
    )
