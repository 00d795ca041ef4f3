"""A transformers model as a weight destination, and where each checkpoint weight stands in it.

The model is sharded by transformers' own TP plan. The plan's style of a parameter gives the sharded dimension; transformers'
conversion table tells which checkpoint weights are packed into one expert tensor. Only styles and conversions whose layout is
known here are placed. Anything else is an error by name, because this engine has no other loader.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from ....integration.errors import RefitError, RefitMismatch
from ....integration.layout import Fragment
from ....integration.layout.boxes import Box, box_of
from ....integration.layout.fragments import local_slice
from ....integration.quantize import blocks, fp8_blockwise, is_float8
from ....integration.quantize.formats import Format, Fp8Blockwise
from ....integration.weights.endpoints import StorageLook
from ....integration.weights.manifest import TensorSpec

_FP8 = Fp8Blockwise()
# Style of transformers' TP plan → dimension of a matrix that it shards; None: whole. Of stacked experts it shards each matrix.
_WEIGHT_DIM: dict[str | None, int | None] = {
    None: None,
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "packed_colwise": 0,
    "rowwise": 1,
    "rowwise_rep": 1,
    "rowwise_split_input": 1,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
}
# A weight that is gate and up one after the other in the checkpoint, too, has each of them shared out.
_JOINED = "packed_colwise"
# A row-parallel bias is added once, after the reduction, and so stands whole everywhere.
_BIAS_DIM = {style: (0 if dim == 0 else None) for style, dim in _WEIGHT_DIM.items()}


class TransformersDestination:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightDestination` for a transformers model.

    Its loader takes full tensors and copies this rank's parts: the same placement that the
    shard-to-shard path writes through.
    """

    def __init__(self, model: torch.nn.Module, tp_rank: int, tp_size: int):
        self._model = model
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._by_name: dict[str, list[Fragment]] = {}
        self._look = StorageLook()

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def kept_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        # Anew: what moves a model to another dtype or device gives it new buffers, and some its parameters too.
        placed = TensorParallelPlacement(self._model, self._tp_rank, self._tp_size).place(specs)
        self._by_name = {}
        for fragment in placed:
            self._by_name.setdefault(fragment.name, []).append(fragment)
        return placed, {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors into the local shards.

        Raises:
            RefitMismatch: a tensor of another shape than was agreed on.
        """
        for name, tensor in weights:
            for fragment in self._by_name.get(name, ()):
                if tuple(tensor.shape) != fragment.full_shape:
                    raise RefitMismatch(
                        f"{list(tensor.shape)} came where {list(fragment.full_shape)} was agreed on",
                        stage="misc",
                        parameter=name,
                    )
                if is_float8(tensor.dtype) and fragment.view.dtype != tensor.dtype:
                    raise RefitMismatch(
                        f"codes in {tensor.dtype} came for a weight kept in {fragment.view.dtype}; their scales would be lost",
                        stage="misc",
                        parameter=name,
                    )
                fragment.view.copy_(tensor[local_slice(box_of(tensor.shape), fragment.box)])

    def finish(self, version: int) -> None:
        """Nothing is derived from the weights, and every call of ``generate`` makes its own KV cache."""

    def abandon(self) -> None:
        """The loader keeps no state between weights."""

    def storage_key(self) -> Hashable:
        # Buffers that checkpoints have (a router's correction bias) are placed as parameters are.
        return self._look.key((*self._model.parameters(), *self._model.buffers()))


class _Held(NamedTuple):
    """A part of a weight: what stands for it, where the model computes with it, and its place in the weight."""

    codes: torch.Tensor
    scales: torch.Tensor
    weight: torch.Tensor
    offset: tuple[int, int]


class TransformersFp8Destination(TransformersDestination):
    """As :class:`TransformersDestination`, with codes and scales in place of decoder layers' matrices.

    Codes and scales are what a refit writes. The model computes with what they stand for, in its own dtype: what FP8 weights do
    to a policy shows in its tokens and log-probabilities, without FP8 kernels and without their speed. Routers, norms,
    embeddings and the head stay in the model's dtype, as in block-FP8 checkpoints.
    """

    def __init__(self, model: torch.nn.Module, tp_rank: int, tp_size: int):
        super().__init__(model, tp_rank, tp_size)
        self._held: list[_Held] = []
        self._stored_look = StorageLook()
        # By name and box, and taken again as long as they fit: what a refit has written stays where it is.
        self._memory: dict[tuple[str, Box], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def kept_bytes(self) -> int:
        quantized = sum(held.weight.nbytes for held in self._held)
        return super().kept_bytes - quantized + sum(h.codes.nbytes + h.scales.nbytes for h in self._held)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`rlrefit.integration.weights.endpoints.StoresQuantized.quantized`."""
        placed = {fragment.name for fragment in super().fragments(specs)[0]}
        return {s.name: _FP8 for s in specs if s.name in placed and self._is_linear(s)}

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        codes = {spec.name for spec in specs if spec.dtype == torch.float8_e4m3fn}
        scales = {name + _FP8.scale_name_end for name in codes}
        placed, _ = super().fragments([spec for spec in specs if spec.name not in scales])
        found: list[Fragment] = []
        self._held = []
        for fragment in placed:
            found += self._stored(fragment) if fragment.name in codes else [fragment]
        self._by_name = {}
        for fragment in found:
            self._by_name.setdefault(fragment.name, []).append(fragment)
        return found, {}

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """None: codes and scales have memory of their own, and what is made of them goes elsewhere."""
        return {}

    def finish(self, version: int) -> None:
        for held in self._held:
            weight = fp8_blockwise.dequantize(
                held.codes, held.scales, held.offset, _FP8.block, held.weight.dtype
            )
            held.weight.copy_(weight)

    def storage_key(self) -> Hashable:
        stored = (tensor for held in self._held for tensor in (held.codes, held.scales))
        return super().storage_key(), self._stored_look.key(stored)

    def _stored(self, fragment: Fragment) -> list[Fragment]:
        """A fragment of codes, and that of the scales of all blocks that it touches."""
        scale_box = blocks.scale_box(fragment.box, _FP8.block)
        codes, scales = self._memory_of(fragment, scale_box)
        (row, _), (column, _) = fragment.box
        self._held.append(_Held(codes, scales, fragment.view, (row, column)))
        scale_shape = blocks.scale_shape(fragment.full_shape, _FP8.block)
        return [
            replace(fragment, view=codes),
            Fragment(fragment.name + _FP8.scale_name_end, scale_shape, scale_box, scales),
        ]

    def _memory_of(self, fragment: Fragment, scale_box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """For its codes, and for scales."""
        place, device = (fragment.name, fragment.box), fragment.view.device
        held = self._memory.get(place)
        if held is None or held[0].device != device:
            held = self._memory[place] = (
                torch.empty(fragment.view.shape, dtype=torch.float8_e4m3fn, device=device),
                torch.empty([stop - start for start, stop in scale_box], dtype=torch.float32, device=device),
            )
        return held

    def _is_linear(self, spec: TensorSpec) -> bool:
        """Whether a weight is of a linear layer or an expert of a decoder layer."""
        if len(spec.shape) != 2 or ".layers." not in spec.name:
            return False
        owner = spec.name.rpartition(".")[0]
        module = dict(self._model.named_modules()).get(owner)
        # transformers keeps experts stacked, so a weight of one of them has no module; its routers are no Linear.
        return isinstance(module, torch.nn.Linear) or (module is None and ".experts." in spec.name)


@dataclass(frozen=True)
class _Slot:
    """A part of a local parameter that one checkpoint weight fills.

    Attributes:
        parameter: its name.
        view: the part.
        order: how it is the parameter's: ``same`` for all of it as it is, ``transposed``, or ``part`` for one of several
            weights that transformers joins.
    """

    parameter: str
    view: torch.Tensor
    order: Literal["same", "transposed", "part"]


class TensorParallelPlacement:
    """Places checkpoint weights into the local shards of a transformers model.

    Args:
        model: the model as ``from_pretrained(tp_plan=…)`` made it; plain tensors hold the local shards.
        tp_rank: rank in the tensor-parallel group.
        tp_size: its size; 1 for an unsharded model.
    """

    def __init__(self, model: torch.nn.Module, tp_rank: int, tp_size: int):
        # Persistent buffers too: a router's correction bias is one.
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(
            model.named_parameters()
        ).keys()
        self._parameters = {n: t for n, t in model.state_dict(keep_vars=True).items() if n not in tied}
        self._plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {}) if tp_size > 1 else {}
        conversions = _conversions(model)
        self._renamings = _renamings(conversions)
        self._packed = list(_packed_experts(conversions))
        self._transposed = list(_transposed(conversions))
        self._tp_rank = tp_rank
        self._tp_size = tp_size

    def place(self, specs: Iterable[TensorSpec]) -> list[Fragment]:
        """Fragments for all weights of ``specs`` that the model has; tied aliases and unknown names give none.

        Raises:
            RefitError: a weight whose layout is not known here or whose shape does not fit, or a
                parameter that ``specs`` do not fill whole; lists all of them.
        """
        fragments: list[Fragment] = []
        problems: list[str] = []
        filled: dict[str, int] = dict.fromkeys(self._parameters, 0)
        for spec in specs:
            slot = self._slot(spec)
            if slot is None:
                continue
            try:
                fragments += self._fragments(spec, slot)
            except ValueError as problem:
                problems.append(str(problem))
                continue
            filled[slot.parameter] += slot.view.numel()
        for name, count in filled.items():
            parameter = self._parameters[name]
            if count != parameter.numel() and not problems:
                problems.append(
                    f"{name}: the trainer's weights fill {count} of its {parameter.numel()} local elements; "
                    "the rest would keep old values"
                )
        if problems:
            raise RefitError(
                "the transformers engine can't take these weights:\n  " + "\n  ".join(problems),
                stage="handshake",
            )
        return fragments

    def _slot(self, spec: TensorSpec) -> _Slot | None:
        name = spec.name
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        if name in self._parameters:
            whole = self._parameters[name].data
            for transposed in self._transposed:
                if transposed.source.search(name):
                    view = transposed.part(whole, spec.shape)
                    return _Slot(name, view, "same" if view is whole else "transposed")
            return _Slot(name, whole, "same")
        for packed in self._packed:
            found = packed.match(name)
            if found and found.parameter in self._parameters:
                part = found.part(self._parameters[found.parameter].data)
                return _Slot(found.parameter, part, "part")
        return None

    def _fragments(self, spec: TensorSpec, slot: _Slot) -> list[Fragment]:
        style = self._style(slot.parameter)
        if style not in _WEIGHT_DIM:
            raise ValueError(f"{spec.name}: no shard rule for the tensor-parallel style {style!r}")
        dim = (_BIAS_DIM if len(spec.shape) == 1 else _WEIGHT_DIM)[style]
        local = tuple(slot.view.shape)
        full = list(local)
        if dim is not None:
            if slot.order == "transposed":
                raise ValueError(f"{spec.name}: no shard rule for what transformers transposes and TP cuts")
            dim += len(local) == 3  # of each expert's matrix
            full[dim] *= self._tp_size
        if spec.shape != tuple(full):
            raise ValueError(
                f"{spec.name}: the trainer exports {list(spec.shape)}, the engine's shards make up {full} "
                f"(style {style}, TP {self._tp_size})"
            )
        if dim is None:
            return [Fragment(spec.name, spec.shape, box_of(local), slot.view)]
        blocks = 2 if style == _JOINED and slot.order == "same" and len(local) > 1 else 1
        length = local[dim] // blocks
        found = []
        for block in range(blocks):
            box = list(box_of(local))
            first = (block * self._tp_size + self._tp_rank) * length
            box[dim] = (first, first + length)
            found.append(
                Fragment(spec.name, spec.shape, tuple(box), slot.view.narrow(dim, block * length, length))
            )
        return found

    def _style(self, parameter: str) -> str | None:
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", parameter)
        return self._plan.get(generic, self._plan.get(generic.rpartition(".")[0]))


@dataclass(frozen=True)
class _Found:
    parameter: str
    expert: int
    block: int
    blocks: int

    def part(self, packed: torch.Tensor) -> torch.Tensor:
        """The expert's rows of one source in ``[experts, blocks * rows, …]``."""
        rows = packed.shape[1] // self.blocks
        return packed[self.expert, self.block * rows : (self.block + 1) * rows]


@dataclass(frozen=True)
class _PackedExperts:
    """Checkpoint weights that transformers stacks over experts and joins along dim 1 of the result."""

    sources: tuple[re.Pattern[str], ...]
    target: str

    def match(self, name: str) -> _Found | None:
        for block, pattern in enumerate(self.sources):
            found = pattern.search(name)
            if found:
                return _Found(
                    name[: found.start()] + self.target, int(found.group(1)), block, len(self.sources)
                )
        return None


@dataclass(frozen=True)
class _Transposed:
    """Checkpoint weights that transformers transposes as it loads them; with ``check`` only such as do not fit otherwise."""

    source: re.Pattern[str]
    dims: tuple[int, int]
    check: bool

    def part(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter as a view in the order of a checkpoint weight of ``shape``."""
        if self.check and shape == tuple(parameter.shape):
            return parameter
        return parameter.transpose(*self.dims)


def _conversions(model: Any) -> list[Any]:
    """What transformers does with checkpoint weights as it loads this model, those of models inside of it too, in its order."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def _renamings(conversions: Sequence[Any]) -> list[Any]:
    """What gives checkpoint weights the names that the model has for them."""
    from transformers.core_model_loading import WeightRenaming

    return [renaming for renaming in conversions if isinstance(renaming, WeightRenaming)]


def _packed_experts(conversions: Sequence[Any]) -> Iterator[_PackedExperts]:
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    for converter in conversions:
        if not isinstance(converter, WeightConverter) or len(converter.target_patterns) != 1:
            continue
        merge, *join = converter.operations
        merges = isinstance(merge, MergeModulelist) and merge.dim == 0
        joins = not join or (len(join) == 1 and isinstance(join[0], Concatenate) and join[0].dim == 1)
        if merges and joins:
            patterns = tuple(
                re.compile(re.escape(source).replace(r"\*", r"(\d+)") + "$")
                for source in converter.source_patterns
            )
            yield _PackedExperts(patterns, converter.target_patterns[0])


def _transposed(conversions: Sequence[Any]) -> Iterator[_Transposed]:
    from transformers.core_model_loading import Transpose, WeightConverter

    for converter in conversions:
        if not isinstance(converter, WeightConverter) or len(converter.operations) != 1:
            continue
        turn, sources = converter.operations[0], converter.source_patterns
        if isinstance(turn, Transpose) and sources == converter.target_patterns:
            for source in sources:
                pattern = re.compile(re.escape(source) + "$")
                yield _Transposed(pattern, (turn.dim0, turn.dim1), turn.check_dims)
