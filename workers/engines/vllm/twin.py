"""A disposable twin of the engine's model without storage, on which the loader can be traced.

The live model is no place to trace on: post-load processing has replaced parameters and dropped their
weight loaders. The twin is built by vLLM's own ``initialize_model``, so its parameters are as they were
before any processing, in the shapes of this rank's tensor, pipeline and expert parallel groups.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype

from ..common.loader_trace.modules import IntegerTablesStayReal


@contextmanager
def meta_twin(model: nn.Module, vllm_config: VllmConfig) -> Iterator[nn.Module]:
    """A second ``model`` for this rank with all weights on the meta device, before any post-load step.

    ``model`` and ``vllm_config`` are left as they are: the twin registers its layers in a copy of the
    compilation configuration, and what modules it shares with the live model (vLLM caches rotary
    embeddings for the process) keep their reload metadata. The twin must not be used after the context.
    """
    with (
        _shared_state_kept(model),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        torch.device("meta"),
        IntegerTablesStayReal(),
    ):
        twin = initialize_model(vllm_config=_twin_config(vllm_config)).eval()
    # vLLM remembers which pipeline layers a model misses by id(model) and never forgets. A twin would
    # inherit the layers of a dead model whose address it got, and bequeath its own to a later one.
    _forget_missing_layers(twin)
    _load_only(twin)
    try:
        yield twin
    finally:
        _forget_missing_layers(twin)


def _load_only(twin: nn.Module) -> None:
    """Undo what has layers quantize themselves as soon as they are loaded whole.

    Where their tensors land is all that a trace asks for; processing would copy them once more, into tensors that belong to
    no parameter, by kernels of which some don't run without storage.
    """
    for module in twin.modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            for tensor in get_layer_tensors(module).values():
                tensor.weight_loader = _get_original_loader(tensor)


def _forget_missing_layers(twin: nn.Module) -> None:
    for module in twin.modules():
        _model_to_pp_missing_layer_names.pop(id(module), None)


def _twin_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the configuration whose registries are empty, so that layer names do not clash."""
    twin = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    compilation.traced_files = set()
    # The twin never runs, so nothing of it is to be compiled.
    compilation.mode = CompilationMode.NONE
    twin.compilation_config = compilation
    return twin


@contextmanager
def _shared_state_kept(model: nn.Module) -> Iterator[None]:
    """Undo what building the twin does to state of the process that the live model uses too."""
    kept = [
        (info, info.restore_metadata, info.restore_device)
        for info in map(get_layerwise_info, model.modules())
    ]
    rotary = dict(rotary_embedding._ROPE_DICT)
    try:
        yield
    finally:
        for info, metadata, device in kept:
            info.restore_metadata, info.restore_device = metadata, device
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(rotary)
