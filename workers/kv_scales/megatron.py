"""Watches the attention of a Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .amax import Record
from .names import AttentionLayer, layer_of_weight


def core_attentions(model: Sequence[nn.Module], tasks: Sequence[Any]) -> dict[AttentionLayer, nn.Module]:
    """The modules of this rank that attend, by the checkpoint's names of their layers.

    Args:
        model: this rank's chunks.
        tasks: Bridge's conversion tasks of the model. They tell the names, so that pipeline stages need no arithmetic.
    """
    attention_of = {
        id(part): attention.core_attention
        for chunk in model
        for attention in chunk.modules()
        if hasattr(attention, "linear_qkv") and hasattr(attention, "core_attention")
        # An adapter wraps the projection.
        for part in attention.linear_qkv.modules()
    }
    found: dict[AttentionLayer, nn.Module] = {}
    for task in tasks:
        core = attention_of.get(id(task.megatron_module))
        if core is None or task.param_weight is None:
            continue
        named = task.mapping.hf_param
        for name in [named] if isinstance(named, str) else named.values():
            layer = layer_of_weight(name)
            if layer is not None:
                found[layer] = core
    return found


@contextmanager
def watched(cores: Mapping[AttentionLayer, nn.Module], record: Record) -> Iterator[None]:
    """Have ``record`` called with what each of ``cores`` gets: queries, keys and values after norm and RoPE."""

    def hook_of(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            record(layer, given["query"], given["key"], given["value"])

        return hook

    handles = [
        core.register_forward_pre_hook(hook_of(layer), with_kwargs=True) for layer, core in cores.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
