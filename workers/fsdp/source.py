"""An FSDP2 rank as a weight source: fragments of its DTensors' shards, and gathered tensors for the rest."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...integration.endpoints import rank_device, storage_key
from ...integration.layout import Fragment, box_of, layout_of, local_fragments
from ...integration.manifest import TensorSpec
from .casting import CastShards
from .checkpoint import CheckpointWeight, conversion_of, trace_checkpoint
from .own_plan import OwnPlan
from .parameters import KeptTensors, require_known


class FSDPSource:
    """Implements :class:`rlrefit.integration.endpoints.WeightSource` for a model under ``fully_shard``.

    FSDP2 and HSDP, resharded after the forward pass or not, offloaded to the CPU or not; over tensor or expert
    parallelism too, in DTensors (``parallelize_module``) or by transformers' own plan. A plain tensor otherwise counts
    as whole on every rank.

    Args:
        model: a transformers model, whose weights get the names that ``save_pretrained`` gives them, or another
            module, whose state dict gives the names.
        dtype: of the export of floating-point parameters, that of the engine; those that transformers keeps in
            FP32 stay so. None exports them as they are kept, and an engine of another dtype gets them over the
            misc path.

    Raises:
        RefitError: a model whose weights can't be told from its tensors; lists all reasons.

    Nothing is a collective but ``export``.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None = None):
        model = getattr(model, "_orig_mod", model)  # under torch.compile
        require_known(model)
        self._kept = KeptTensors(model)
        self._convert = conversion_of(model)
        self._cast = CastShards()
        kept = {name: self._kept[name] for name in self._kept.names}
        shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
        self._plan: OwnPlan | None = None
        if (getattr(model, "_tp_size", None) or 1) > 1:
            self._plan = OwnPlan(model, shapes)
            shapes = {name: self._plan.shape(name) for name in shapes}
        self._weights = trace_checkpoint(
            self._convert, {name: (shapes[name], tensor.dtype) for name, tensor in kept.items()}
        )
        if self._plan is not None:
            self._plan.check(self._weights)
        self._dtypes = _export_dtypes(model, self._kept, dtype)
        self._specs = [TensorSpec(w.name, w.shape, self._dtype(w)) for w in self._weights]
        self._chosen: tuple[frozenset[str], list[CheckpointWeight]] = frozenset(), []

    @property
    def device(self) -> torch.device:
        return rank_device()

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held: list[Fragment] = []
        refused: dict[str, str] = {}
        known: dict[str, list[Fragment] | str] = {}
        for weight in self._weights:
            if weight.part is None:
                refused[weight.name] = weight.reason
                continue
            (name,) = weight.made_of
            if name not in known:
                known[name] = self._held(name)
            found = known[name]
            if isinstance(found, str):
                refused[weight.name] = found
            else:
                held.extend(cut for fragment in found if (cut := weight.part.cut(weight.name, fragment)))
        return held, refused

    def settle(self) -> None:
        # What FSDP has gathered needs nothing: the shards are read, which the optimizer writes.
        self._cast.refresh(self._kept.local)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = frozenset(names)
        if wanted != self._chosen[0]:
            # Kept: every refit asks for the same ones, and must not walk through thousands of weights.
            self._chosen = wanted, [weight for weight in self._weights if weight.name in wanted]
        made: dict[str, torch.Tensor] = {}
        made_of: tuple[str, ...] = ()
        for weight in self._chosen[1]:
            if weight.made_of != made_of:
                made.clear()  # before more is gathered
                made_of = weight.made_of
                with torch.no_grad():
                    made = self._convert({name: self._whole(name) for name in made_of})
            yield weight.name, made[weight.name].to(self._dtype(weight))

    def storage_key(self) -> Hashable:
        return storage_key(map(self._kept.local, self._kept.names))

    def _dtype(self, weight: CheckpointWeight) -> torch.dtype:
        """Of the export: a conversion's own dtype stands."""
        kept = [self._kept[name].dtype for name in weight.made_of]
        return self._dtypes[weight.made_of[0]] if set(kept) == {weight.dtype} else weight.dtype

    def _held(self, name: str) -> list[Fragment] | str:
        """What this rank holds of one of the model's tensors, or why that can't be told."""
        tensor, local = self._kept[name], self._kept.local(name)
        if type(local) is not torch.Tensor:
            return f"{name} is kept as {type(local).__name__}, whose memory may not be its values"
        if isinstance(tensor, DTensor):
            try:
                mesh, placements = layout_of(tensor)
            except ValueError as reason:
                return f"{name}: {reason}"
            if mesh.coordinate(dist.get_rank()) is None:
                return []
            local = self._cast.of(name, local, self._dtypes[name])
            held = local_fragments(name, tensor.shape, mesh, placements, dist.get_rank(), local)
        else:
            local = self._cast.of(name, local, self._dtypes[name])
            held = [Fragment(name, tuple(local.shape), box_of(local.shape), local)]
        return held if self._plan is None else self._plan.placed(name, held)

    def _whole(self, name: str) -> torch.Tensor:
        tensor, local = self._kept[name], self._kept.local(name).to(self.device)
        if isinstance(tensor, DTensor):
            # Anew, since an offloaded shard is on the host, where the mesh's backend may not gather.
            shards = DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            local = shards.full_tensor()
        return local if self._plan is None else self._plan.gathered(name, local)


def _export_dtypes(
    model: torch.nn.Module, kept: KeptTensors, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype that each of the model's tensors is exported in."""
    plan = getattr(model, "_get_dtype_plan", None)
    in_fp32 = [re.compile(key.replace("*", ".*")) for key in plan(dtype)] if plan and dtype else []
    return {
        name: dtype
        if dtype
        and kept.is_parameter(name)
        and kept[name].is_floating_point()
        and not any(pattern.search(name) for pattern in in_fp32)
        else kept[name].dtype
        for name in kept.names
    }
