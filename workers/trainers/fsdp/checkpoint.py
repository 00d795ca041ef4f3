"""Which checkpoint weights a transformers model is saved as, and which part of which parameter each of them is.

transformers 5 keeps some parameters in another form than its checkpoints (all experts of a layer in one tensor, say)
and reverts that when it saves a model. Here its own code does so once with tensors that have a shape and no memory: a
weight that comes out as a view of one of them is that part of the parameter, whatever the conversion is called. All
else has no shard rule.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ....integration.errors import RefitError
from ....integration.layout import box_of
from .part import Part

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

# What torch calls a module in the one that it puts around it: torch.compile, and activation checkpointing, which accelerate takes too.
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight as the checkpoint has it.

    Attributes:
        name: in the checkpoint.
        shape: of the full tensor.
        dtype: as the model keeps it.
        made_of: names of the model's tensors that it is computed from, ascending.
        part: the part of ``made_of[0]`` that it is; None if it is not known to be one.
        reason: why not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_of: tuple[str, ...]
    part: Part | None
    reason: str = ""


def conversion_of(model: torch.nn.Module) -> Convert:
    """What transformers does to a state dict before it saves it; nothing for a model of another kind."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return dict
    return lambda state: revert_weight_conversion(model, state)


def unwrapped(name: str) -> str:
    """The name that a module or tensor has where torch has put nothing around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """As ``named_modules`` of a model in which torch has put nothing around modules."""
    return (
        (unwrapped(path), module)
        for path, module in model.named_modules()
        if _WRAPPED.isdisjoint(module._modules)
    )


def saved_names(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a state dict that are saved: without those to be ignored, and one name of a tied tensor.

    The rules are those of transformers' ``save_pretrained``, which tells tied tensors from their memory.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = [
        f"{path}.{key}" if path else key
        for path, module in unwrapped_modules(model)
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if name not in ignored:
            names_of[id(tensor)].append(name)
    left_out: set[str] = set()
    for names in names_of.values():
        aliases = [name for name in sorted(names) if any(re.search(key, name) for key in tied)]
        left_out.update(aliases[: len(names) - 1])
    return [name for name in state if name not in ignored and name not in left_out]


def trace_checkpoint(
    convert: Convert, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[CheckpointWeight]:
    """The weights that ``convert`` makes of a state dict, in its order.

    Args:
        convert: as :func:`conversion_of` gives it.
        tensors: full shape and dtype of each saved tensor of the model.

    Raises:
        RefitError: the conversion yields what was not made of the model's tensors.
    """
    probes = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()
    }
    origins = _Origins(probes)
    with torch.no_grad(), origins:
        made = convert(dict(probes))
    weights = []
    for name, tensor in made.items():
        sources = origins.of(tensor)
        if not sources:
            raise RefitError(
                "transformers' conversion makes this weight of none of the model's tensors; its values could not be "
                "refitted. Nothing was sent. Train a model whose checkpoint holds its own tensors",
                stage="prepare",
                parameter=name,
            )
        part, reason = _part(tensor, sources, probes, origins)
        weights.append(
            CheckpointWeight(name, tuple(tensor.shape), tensor.dtype, tuple(sorted(sources)), part, reason)
        )
    return weights


def _part(
    tensor: torch.Tensor, sources: frozenset[str], probes: Mapping[str, torch.Tensor], origins: _Origins
) -> tuple[Part | None, str]:
    listed = ", ".join(sorted(sources))
    if len(sources) > 1:
        return None, f"transformers' conversion makes it of {listed} together"
    probe = probes[listed]
    if origins.written & sources:
        return None, f"transformers' conversion writes into {listed}"
    if tensor is probe:
        return Part(box_of(probe.shape), tuple(range(probe.dim()))), ""
    moved = tensor.untyped_storage()._cdata != probe.untyped_storage()._cdata
    if moved or tensor.dtype != probe.dtype or tensor.is_neg() or tensor.is_conj():
        return None, f"transformers' conversion computes it from {listed}"
    part = Part.of_view(tensor, probe.shape)
    return (
        part,
        "" if part else f"transformers' conversion makes it of elements of {listed} that are no box of it",
    )


class _Origins(TorchDispatchMode):
    """Follows which of some tensors' memory others are computed from, or show."""

    def __init__(self, probes: Mapping[str, torch.Tensor]):
        super().__init__()
        self._found: dict[int, frozenset[str]] = {}
        self._kept: list[torch.UntypedStorage] = []  # else the identity of one could become another's
        self.written: frozenset[str] = frozenset()
        for name, probe in probes.items():
            self._add(probe, frozenset((name,)))

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._found.get(tensor.untyped_storage()._cdata, frozenset())

    def _add(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._found:
            self._kept.append(storage)
        self._found[storage._cdata] = self.of(tensor) | sources

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources = frozenset[str]().union(*map(self.of, inputs))
        if func._schema.is_mutable:
            self.written |= sources
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, sources)
        return result
