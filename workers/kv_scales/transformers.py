"""Watches the attention of a transformers model, under FSDP2 or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ...integration.errors import RefitError
from .amax import Record
from .names import AttentionLayer

_EAGER = "eager"


@contextmanager
def watched(attentions: Mapping[AttentionLayer, nn.Module], record: Record) -> Iterator[None]:
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
            "can't be seen. Set policy.refit.kv_scales=false, or give nccl_xfer_refit scales of your own",
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
