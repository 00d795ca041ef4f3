"""Where each checkpoint weight stands in a transformers model that is sharded by transformers' own TP plan.

The plan's style of a parameter gives the sharded dimension; transformers' conversion table tells which
checkpoint weights are packed into one expert tensor. Only styles and conversions whose layout is
known here are placed; anything else is an error by name, because this engine has no other loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.layout.boxes import Box
from ....integration.weights.manifest import TensorSpec

# Style of transformers' TP plan → dimension of a two-dimensional checkpoint weight that it shards; None: whole.
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
}
# A row-parallel bias is added once, after the reduction, and so stands whole everywhere.
_BIAS_DIM = {style: (0 if dim == 0 else None) for style, dim in _WEIGHT_DIM.items()}


@dataclass(frozen=True)
class _Slot:
    """A part of a local parameter that one checkpoint weight fills: the view, and the parameter's name."""

    parameter: str
    view: torch.Tensor


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
        self._packed = list(_packed_experts(model))
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
            slot = self._slot(spec.name)
            if slot is None:
                continue
            try:
                fragments.append(self._fragment(spec, slot))
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

    def _slot(self, name: str) -> _Slot | None:
        if name in self._parameters:
            return _Slot(name, self._parameters[name].data)
        for packed in self._packed:
            found = packed.match(name)
            if found and found.parameter in self._parameters:
                return _Slot(found.parameter, found.part(self._parameters[found.parameter].data))
        return None

    def _fragment(self, spec: TensorSpec, slot: _Slot) -> Fragment:
        style = self._style(slot.parameter)
        if style not in _WEIGHT_DIM:
            raise ValueError(f"{spec.name}: no shard rule for the tensor-parallel style {style!r}")
        dim = (_BIAS_DIM if len(spec.shape) == 1 else _WEIGHT_DIM)[style]
        local = tuple(slot.view.shape)
        full = list(local)
        box: list[tuple[int, int]] = [(0, n) for n in local]
        if dim is not None:
            full[dim] *= self._tp_size
            box[dim] = (self._tp_rank * local[dim], (self._tp_rank + 1) * local[dim])
        if spec.shape != tuple(full):
            raise ValueError(
                f"{spec.name}: the trainer exports {list(spec.shape)}, the engine's shards make up {full} "
                f"(style {style}, TP {self._tp_size})"
            )
        wanted: Box = tuple(box)
        return Fragment(spec.name, spec.shape, wanted, slot.view)

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


def _packed_experts(model: Any) -> Iterator[_PackedExperts]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    for converter in get_checkpoint_conversion_mapping(model.config.model_type) or []:
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
