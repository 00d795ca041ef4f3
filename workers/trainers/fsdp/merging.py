"""Shards of weights with their LoRA adapters merged in, beside the shards that are trained.

peft's ``merge_and_unload`` computes ``W += transpose(B @ A) * scaling`` for one adapter after the other. A rank does that
for its shard alone, from the whole factors, with the bits of peft's own merge (:mod:`..low_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ....integration.layout import box_of
from ..alike import require_alike
from ..low_rank import Delta, Part, merge
from .adapters import LoraTarget
from .parameters import KeptTensors


class MergedShards:
    """Copies of local shards with their adapters merged in, made anew for every refit.

    They take the elements of all weights under adapters in the dtype of the export, for as long as the source lives:
    with BF16 base weights, as much as these themselves. The factors are gathered one weight at a time, and the widest
    product comes on top for a moment.

    Args:
        kept: the base weights.
        factors: of the adapters.
        targets: the weights under adapters, by name; the same on all ranks.
        device: that computes.
    """

    def __init__(
        self,
        kept: KeptTensors,
        factors: KeptTensors,
        targets: Mapping[str, LoraTarget],
        device: torch.device,
    ):
        self._kept = kept
        self._factors = factors
        self._targets = targets
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def of(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a weight's local shard, which is merged after the next :meth:`refresh`."""
        local = self._kept.local(name)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (local.shape, dtype, local.device):
            copy = self._copies[name] = torch.empty_like(local, dtype=dtype)
        return copy

    @property
    def copies(self) -> Collection[torch.Tensor]:
        """All that :meth:`of` has given and :meth:`refresh` writes."""
        return self._copies.values()

    def refresh(self, ready: Callable[[], None]) -> None:
        """Merge what the shards and the factors hold now; a collective of the ranks that share the model.

        Args:
            ready: raises if this rank can't send its weights.

        Raises:
            RefitError: on all of these ranks, what ``ready`` raised on one, or that they compute with different adapters.
        """
        if not self._targets:
            ready()  # and the others hear of it where all ranks meet
            return

        def applied() -> str:
            ready()
            self._factors.require_same_places()
            return ", ".join(
                f"{target.path}: {' + '.join(f'{a} * {target.layer.scaling[a]}' for a in target.applied()) or 'none'}"
                for target in self._targets.values()
            )

        require_alike(applied, "adapters at work", self._groups(), self._device)
        for name, copy in self._copies.items():
            deltas = self._deltas(name)
            base, merged = self._kept.held(name, self._kept.local(name)), self._kept.held(name, copy)
            assert isinstance(base, list), f"{name} has a copy only if its layout is known"
            assert isinstance(merged, list)
            with torch.no_grad():
                if base:
                    parts = [Part(b.view, b.box, m.view) for b, m in zip(base, merged, strict=True)]
                    merge(parts, base[0].full_shape, deltas)

    def whole(self, name: str) -> torch.Tensor:
        """A full weight, merged, in the dtype that it is kept in; a collective as :meth:`refresh`."""
        weight = self._kept.whole(name, self._device)
        out = torch.empty_like(weight)
        with torch.no_grad():
            merge([Part(weight, box_of(weight.shape), out)], weight.shape, self._deltas(name))
        return out

    def _groups(self) -> list[dist.ProcessGroup]:
        """Of the ranks that share the model: those of the mesh of the most ranks, dimension by dimension."""
        kept = [self._kept[name] for name in self._kept.names]
        meshes = [tensor.device_mesh for tensor in kept if isinstance(tensor, DTensor)]
        return max(meshes, key=lambda mesh: mesh.size()).get_all_groups() if meshes else []

    def _deltas(self, name: str) -> list[Delta]:
        target = self._targets[name]
        found = []
        with torch.no_grad():
            for adapter in target.applied():
                names = target.factors[adapter]
                a, b = (self._factors.whole(factor, self._device) for factor in (names.a, names.b))
                scaling = target.layer.scaling[adapter]
                found.append(Delta(a, b, scaling, target.transposed, target.rounded))
        return found
