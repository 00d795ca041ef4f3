"""Calibration of an FP8 KV cache on the trainer: what goes into its attention, and the scales that this gives.

:class:`AmaxRecorder` keeps the largest magnitudes on the device. :func:`watch_megatron` and :func:`watch_transformers` have it called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...integration.errors import RefitError
from ...integration.quantize.blocks import largest_magnitude
from .endpoints import AttentionLayer, layer_of_weight, scale_names

# Of a layer, its queries, its keys and its values.
Record = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], None]

# The largest finite value of float8_e4m3fn.
E4M3_MAX = 448.0


class AmaxRecorder:
    """Takes what goes into the attention of each layer, and makes scales of it.

    Nothing waits for the device until :meth:`scales`.

    Args:
        layers: all attention layers of the model, on all ranks alike.
        device: of the model.
    """

    def __init__(self, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self._layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        # Of k, v and q, and whether the layer ran.
        self._amax = torch.zeros(len(self._layers), 4, dtype=torch.float32, device=device)

    @torch.no_grad()
    def record(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Take a layer's inputs of one forward pass, of any shapes, as they go into the KV cache: after RoPE."""
        if not key.numel():
            return
        found = [largest_magnitude(tensor) for tensor in (key, value, query)]
        row = self._amax[self._rows[layer]]
        torch.maximum(row, torch.stack([*found, torch.ones_like(found[0])]), out=row)

    def scales(self, margin: float, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """What was recorded on all ranks, as scales: amax * margin / 448. One collective of ``group``.

        The maximum is taken over all ranks, so that it does not matter which heads, tokens and layers each of them had.

        Args:
            margin: room for values beyond the calibration's.
            group: all ranks of the trainer; None for the default group.

        Returns:
            Name to scale of the layers that ran, equal on all ranks; float32 values.

        Raises:
            RefitError: ``margin`` is below 1, or activations were not finite, with the names of the layers. Raised on
                all ranks.
        """
        if not margin >= 1:
            raise RefitError(
                f"margin: {margin} would have the engine clip the largest keys and values of the calibration itself; give at "
                "least 1",
                stage="calibrate",
            )
        # A reduction may drop NaN; infinity it keeps.
        amax = self._amax.nan_to_num(nan=float("inf"), posinf=float("inf"))
        if dist.is_initialized():
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        ran = amax[:, 3] > 0
        # A layer of zeros alone fits with any scale.
        scales = torch.where(amax[:, :3] > 0, amax[:, :3] * (margin / E4M3_MAX), 1.0)
        rows = torch.cat([scales, ran[:, None]], dim=1).tolist()
        found = {layer: row[:3] for layer, row in zip(self._layers, rows, strict=True) if row[3]}
        broken = [layer for layer, row in found.items() if float("inf") in row]
        if broken:
            raise RefitError(
                f"calibration: keys, values or queries of {', '.join(broken)} were infinite or not a number, so there is no "
                "scale for them. Nothing was sent; find what makes the policy diverge",
                stage="calibrate",
                parameter=broken[0],
            )
        return {
            name: value
            for layer, row in found.items()
            for name, value in zip(scale_names(layer), row, strict=True)
        }


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
def watch_megatron(cores: Mapping[AttentionLayer, nn.Module], record: Record) -> Iterator[None]:
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


@contextmanager
def watch_transformers(attentions: Mapping[AttentionLayer, nn.Module], record: Record) -> Iterator[None]:
    """Have ``record`` called with what each attention module hands to transformers' attention interface.

    That is queries, keys and values after norm and RoPE, keys and values before they are repeated for query groups.

    Raises:
        RefitError: a layer's attention is computed without that interface.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layer_of = {id(module): layer for layer, module in attentions.items()}
    kinds = {_implementation(layer, module) for layer, module in attentions.items()}

    def watching(compute: Callable[..., Any] | None) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            layer = layer_of.get(id(module))
            if layer is not None:
                record(layer, query, key, value)
            return (compute or _eager_of(module))(module, query, key, value, *args, **kwargs)

        return attend

    with ExitStack() as stack:
        for kind in kinds:
            # Looked up in every forward pass; the models themselves and their masks are not touched.
            present = ALL_ATTENTION_FUNCTIONS.get(kind)
            stack.callback(
                _put_back, ALL_ATTENTION_FUNCTIONS, kind, ALL_ATTENTION_FUNCTIONS._local_mapping.get(kind)
            )
            ALL_ATTENTION_FUNCTIONS[kind] = watching(present)
        yield


def _put_back(functions: Any, kind: str, own: Callable[..., Any] | None) -> None:
    if own is None:
        del functions[kind]
    else:
        functions[kind] = own


def _implementation(layer: AttentionLayer, module: nn.Module) -> str:
    found = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(found, str):
        raise RefitError(
            f"{type(module).__name__} does not compute its attention through transformers' attention interface, so its keys "
            "can't be seen. Set policy.refit.kv_scales=false, or give refit scales of your own",
            stage="calibrate",
            parameter=layer,
        )
    return found


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a model's own file has for ``eager``, which the interface does not list."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise RefitError(
        f"{type(module).__module__} has no eager_attention_forward. Load the model with attn_implementation='sdpa'",
        stage="calibrate",
    )
