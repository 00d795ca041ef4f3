"""A trainer rank as a source of packed NVFP4 weights, shard to shard.

Codes and block scales are made of what this rank holds as they are packed, by the global scales that all trainer ranks make before
each refit. Only the scalars lie in memory beside the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....integration.layout import Fragment
from ....integration.quantize import blocks
from ....integration.quantize.formats import Codes, Format, Nvfp4, Scales, WholeBlocks
from ....integration.quantize.jobs import GlobalScale
from ....integration.quantize.nvfp4_checkpoint import packed_names
from ....integration.weights.endpoints import (
    Look,
    WeightSource,
    Writes,
    gives_memory_back,
    prepares_alone,
    trained_formats,
    writes_by,
)
from ....integration.weights.manifest import TensorSpec
from ....integration.weights.quantizing import unfit
from .model import QAT
from .scales import AsSent, Found

_FORMAT = Nvfp4()


@dataclass(frozen=True)
class _Scalars:
    """Memory of scalars of one kind, of weights that are exported in one dtype, and where their values are.

    Attributes:
        dtype: of the weights.
        memory: FP32, one scalar behind the other, so that one copy writes all.
        positions: of each in what :class:`QAT` tells.
    """

    dtype: torch.dtype
    memory: torch.Tensor
    positions: torch.Tensor


class _Scales(NamedTuple):
    """Global scales of weights that are exported in one dtype.

    Attributes:
        scalars: of them.
        weights: their names.
        found: int32, the ``found`` of each (:class:`rlrefit.integration.quantize.jobs.GlobalScale`).
    """

    scalars: _Scalars
    weights: Sequence[str]
    found: torch.Tensor


class PackedSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` in place of the source of unquantized weights.

    A shard that cuts no block of 16 columns gives the bytes of a slice of the whole packed weight. Other weights, and
    those that ``source`` refuses, take the misc path, packed.

    Args:
        source: of the unquantized weights, in the engine's dtype.
        qat: of the same model.

    :meth:`prepare` is a collective of all trainer ranks, if there are several.

    Raises:
        ValueError: of a policy in INT4, whose codes the refit makes of ``source`` itself.
    """

    def __init__(self, source: WeightSource, qat: QAT):
        if not qat.config.format.has_global_scale:
            raise ValueError(
                f"PackedSource packs NVFP4, and the policy trains in {qat.config.format_name}; send the unquantized source with "
                f"policy.refit.{qat.config.format.setting}=true"
            )
        self._source = source
        self._qat = qat
        # The same memory each time: who asked for fragments before reads what :meth:`prepare` writes, as who asks now.
        self._global_scales: dict[str, GlobalScale] = {}
        self._input_scales: dict[str, torch.Tensor] = {}
        # Of these, as :meth:`prepare` needs it.
        self._weight_scalars: list[_Scales] = []
        self._input_scalars: list[_Scalars] = []
        # What was encoded wholly in the last refit.
        self._encoded: frozenset[str] | None = None
        self._specs = [packed for spec in source.specs() for packed in qat.specs(spec)]
        self._dtypes = {spec.name: spec.dtype for spec in source.specs() if spec.name in qat.weights}
        self._origin = {packed.name: spec.name for spec in source.specs() for packed in qat.specs(spec)}

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def gives_memory_back(self) -> bool | None:
        return gives_memory_back(self._source)

    @property
    def prepares_alone(self) -> bool:
        """As :attr:`rlrefit.integration.weights.endpoints.PreparesAlone.prepares_alone`: where no rank has scales to share with another."""
        return self._qat.alone and prepares_alone(self._source)

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        return trained_formats(self._source) or self._qat.formats

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return self._qat.formats

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, told = self._source.fragments()
        refused = dict(told)  # which may be the source's own
        for fragment in held:
            if fragment.name in self._qat.weights and (reason := _misfit(fragment)):
                refused[fragment.name] = reason
        packed = [f for f in held if f.name not in self._qat.weights]
        self._make_scalars(
            dict.fromkeys(f.name for f in held if f.name in self._qat.weights and f.name not in refused)
        )
        sent: set[str] = set()
        for fragment in held:
            if fragment.name in self._qat.weights and fragment.name not in refused:
                packed += self._packed(fragment)
                if fragment.name not in sent:
                    packed += self._scalars(fragment.name)
                    sent.add(fragment.name)
        return packed, {name: refused[origin] for name, origin in self._origin.items() if origin in refused}

    def prepare(self) -> None:
        self._prepare(None)

    def prepare_ahead(self, encoded: frozenset[str]) -> Look | None:
        """As :meth:`rlrefit.integration.weights.endpoints.PreparesAhead.prepare_ahead`: by the scales of the last refresh."""
        if encoded is not self._encoded:
            self._encoded, self._as_sent = encoded, self._looked_at(encoded)
        for scales in self._weight_scalars:
            scales.found.zero_()
        return self._prepare(self._as_sent)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(names)
        origins = dict.fromkeys(self._origin[name] for name in names)
        for origin, weight in self._source.export(list(origins)):
            for name, tensor in self._qat.packed(origin, weight):
                if name in wanted:
                    yield name, tensor

    def storage_key(self) -> Hashable:
        return self._source.storage_key()

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`, of the unquantized weights."""
        return writes_by(self._source)

    def _prepare(self, ahead: AsSent | None) -> Look | None:
        look = self._qat.prepare_export(self._source, ahead)
        with torch.no_grad():
            for scalars, *_ in self._weight_scalars:
                scalars.memory.copy_(self._qat.scales_at(scalars.positions, scalars.dtype))
            for scalars in self._input_scalars:
                scalars.memory.copy_(self._qat.input_scales_at(scalars.positions))
        return look

    def _looked_at(self, encoded: frozenset[str]) -> AsSent:
        """Weights that are looked at where all of these codes are made."""
        weights: list[str] = []
        found: list[Found] = []
        for scalars, names, bits in self._weight_scalars:
            places = {weight: n for n, weight in enumerate(names) if packed_names(weight).weight in encoded}
            if places:
                at = torch.tensor([*places.values()], dtype=torch.int64, device=self.device)
                found.append(Found(scalars.dtype, self._qat.positions([*places]), bits, at))
                weights += places
        return AsSent(frozenset(weights), found)

    def _packed(self, fragment: Fragment) -> Iterator[Fragment]:
        names, dtype = packed_names(fragment.name), self._dtypes[fragment.name]
        method = WholeBlocks(_FORMAT, None if fragment.view.dtype == dtype else dtype)
        shared = self._global_scales[fragment.name]
        for name, encoding in (
            (names.weight, Codes(method, shared)),
            (names.weight_scale, Scales(method, shared)),
        ):
            whole = encoding.shape(fragment.full_shape)
            yield Fragment(
                name, whole, blocks.scale_box(fragment.box, encoding.unit), fragment.view, encoding
            )

    def _scalars(self, weight: str) -> Iterator[Fragment]:
        """Fragments of a weight's global scale and of that of its inputs."""
        names = packed_names(weight)
        yield Fragment(names.weight_scale_2, (), (), self._global_scales[weight].value)
        if weight in self._input_scales:
            yield Fragment(names.input_scale, (), (), self._input_scales[weight])

    def _make_scalars(self, weights: Iterable[str]) -> None:
        """Memory for the scalars of those weights that have none."""
        of_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
        for weight in weights:
            if weight not in self._global_scales:
                of_dtype[self._dtypes[weight]].append(weight)
        for dtype, fresh in of_dtype.items():
            memory = self._memory(len(fresh))
            found = torch.zeros(len(fresh), dtype=torch.int32, device=self.device)
            self._weight_scalars.append(
                _Scales(_Scalars(dtype, memory, self._qat.positions(fresh)), fresh, found)
            )
            self._global_scales |= zip(fresh, map(GlobalScale, memory.unbind(), found.unbind()), strict=True)
            scaled = [weight for weight in fresh if packed_names(weight).input_scale in self._origin]
            if scaled:
                memory = self._memory(len(scaled))
                self._input_scalars.append(_Scalars(dtype, memory, self._qat.input_positions(scaled)))
                self._input_scales |= zip(scaled, memory.unbind(), strict=True)

    def _memory(self, count: int) -> torch.Tensor:
        # NaN until all ranks have made it: what is packed too early shows.
        return torch.full((count,), torch.nan, dtype=torch.float32, device=self.device)


def _misfit(fragment: Fragment) -> str:
    """Why a part can't be packed alone, or an empty string."""
    reason = unfit(fragment)
    if reason or not blocks.straddled(fragment.box, fragment.full_shape, _FORMAT.block):
        return reason
    start, stop = fragment.box[1]
    return (
        f"a rank holds columns {start}:{stop}, which cuts blocks of {_FORMAT.block[1]} elements, so the whole weight is "
        "packed"
    )
