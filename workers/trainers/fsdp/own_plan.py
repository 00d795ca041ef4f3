"""Tensor and expert parallelism that transformers did itself (``tp_plan``, ``enable_expert_parallel``).

It leaves plain tensors that hold a rank's part; which part, only the style of the model's plan says. Whole shapes come
from the model's class, built once more without memory, so that a style that is read wrongly shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from ....integration.errors import RefitError
from ....integration.layout import (
    Fragment,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    boxes_of,
    intersect,
    local_shape,
    local_slice,
    mesh_of,
)
from .checkpoint import CheckpointWeight

# Style → (dimension that it cuts, or None; blocks along it that are cut each for itself), as ``shard_tensor`` of the
# styles in transformers.integrations.tensor_parallel does.
_STYLES: dict[str | None, tuple[int | None, int]] = {
    None: (None, 1),
    "colwise": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "packed_rowwise": (-1, 2),
    "embedding_rowwise": (0, 1),
    "embedding_colwise": (1, 1),
    "grouped_gemm": (0, 1),
    **dict.fromkeys(
        (
            "all_reduce",
            "ep_router",
            "mla_kv_a_proj",
            "moe_identity_expert",
            "moe_tp_experts",
            "replicated_with_grad_allreduce",
            "sequence_parallel",
        ),
        (None, 1),
    ),
}
_BIAS_WHOLE = ("rowwise", "rowwise_split_input", "packed_rowwise")


class OwnPlan:
    """Which part of its whole each tensor of a model is.

    Args:
        model: as ``from_pretrained`` sharded it.
        shapes: what the model's tensors have on this rank, FSDP's shards put together.

    Raises:
        RefitError: a style that is not known here, or tensors that are not what their style makes; lists all.
    """

    def __init__(self, model: Any, shapes: dict[str, tuple[int, ...]]):
        from transformers.integrations.tensor_parallel import _get_parameter_tp_plan

        kind = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
        with torch.device("meta"):
            whole = kind(model.config).state_dict()
        _require_none(
            [f"{name}: {kind.__name__} has no tensor of this name" for name in shapes if name not in whole]
        )
        self._mesh = model._device_mesh
        self._shapes = {name: tuple(whole[name].shape) for name in shapes}
        self._cuts: dict[str, tuple[int | None, int]] = {}
        self._styles: dict[str, str | None] = {}
        problems = []
        for name, shape in shapes.items():
            style = _get_parameter_tp_plan(name, model.tp_plan)
            if style not in _STYLES:
                problems.append(f"{name}: no shard rule for the style {style!r}")
                continue
            self._styles[name], self._cuts[name] = style, _cut(style, self._shapes[name])
            expected = local_shape(self._shapes[name], mesh_of(self._mesh), self._ours(name), dist.get_rank())
            if expected != shape:
                problems.append(
                    f"{name}: {list(shape)} is not what the style {style!r} makes of {list(self._shapes[name])} on "
                    f"{self._mesh.size()} ranks, which is {list(expected)}"
                )
        _require_none(problems)

    def check(self, weights: Sequence[CheckpointWeight]) -> None:
        """Check the cuts against what the tensors are made of.

        transformers cuts each weight of the checkpoint for itself when it loads it, and joins the pieces: of a tensor
        that is joined along the dimension that is cut, a rank holds a piece of every weight.

        Raises:
            RefitError: a tensor that is joined otherwise than its style says; lists all.
        """
        problems: dict[str, str] = {}
        for weight in weights:
            for name in weight.made_of:
                dim, blocks = self._cuts[name]
                if dim is None or self._styles[name] == "grouped_gemm":
                    continue
                part, shape = weight.part, self._shapes[name]
                if part is not None:
                    start, stop = part.box[dim]
                    if part.shape == shape or (stop - start) * blocks == shape[dim]:
                        continue
                problems[name] = (
                    f"{name}: the style {self._styles[name]!r} does not say how it is joined of weights like "
                    f"{weight.name}"
                )
        _require_none(list(problems.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[name]

    def placed(self, name: str, held: Sequence[Fragment]) -> list[Fragment]:
        """Fragments of this rank's part of a tensor as fragments of the whole."""
        whole = self._shapes[name]
        found = []
        for box, slices in boxes_of(whole, mesh_of(self._mesh), self._ours(name), dist.get_rank()):
            place = tuple((s.start, s.stop) for s in slices)
            for fragment in held:
                common = intersect(place, fragment.box)
                if common is not None:
                    moved = tuple(
                        (start + a - origin, start + b - origin)
                        for (start, _), (origin, _), (a, b) in zip(box, place, common, strict=True)
                    )
                    view = fragment.view[local_slice(fragment.box, common)]
                    found.append(Fragment(name, whole, moved, view))
        return found

    def gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor of every rank's part; a collective of the ranks that share the model."""
        dim, blocks = self._cuts[name]
        if dim is None:
            return part
        shape = self._shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(
            part, self._mesh, [TorchShard(dim)], run_check=False, shape=shape, stride=stride
        )
        joined = parts.full_tensor()
        if blocks == 1:
            return joined
        # Rank by rank, as it lies now, to block by block.
        return (
            joined.unflatten(dim, (self._mesh.size(), blocks, -1))
            .transpose(dim, dim + 1)
            .flatten(dim, dim + 2)
        )

    def _ours(self, name: str) -> tuple[Placement]:
        dim, blocks = self._cuts[name]
        if dim is None:
            return (Replicate(),)
        return (Shard(dim) if blocks == 1 else StridedShard(dim, blocks),)


def _cut(style: str | None, shape: tuple[int, ...]) -> tuple[int | None, int]:
    """The dimension of a tensor that a style cuts, or None, and the blocks along it."""
    dim, blocks = _STYLES[style]
    if dim is None or not shape:
        return None, 1
    if len(shape) == 1:
        # A row-parallel bias is added once, after the reduction, and stands whole everywhere.
        return (None if style in _BIAS_WHOLE else 0), 1
    return dim % len(shape), blocks


def _require_none(problems: list[str]) -> None:
    if problems:
        raise RefitError(
            "these tensors that transformers sharded can't be told; their bytes would land in the wrong place. "
            "Nothing was sent. Use parallelize_module, whose DTensors tell their layout:\n  "
            + "\n  ".join(problems),
            stage="prepare",
        )
