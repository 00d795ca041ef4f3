"""Packed layers of a vLLM model, by vLLM's own step after loading, and what kernels hold beside them.

Each format says in a module of its own (:mod:`.nvfp4`, :mod:`.mxfp4`, :mod:`.mxfp8`, :mod:`.int4`) which layers are known and what
becomes of their tensors. A layer that is not made as vLLM makes it takes vLLM's reload.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_default_torch_dtype

from ..common.packed.layers import (
    WORKSPACE,
    PackedFormat,
    PackedLayers,
    apart,
    clear_workspaces,
    require_none_beside,
    vars_and_buffers,
)
from .completeness import unused_of
from .int4 import Int4Layers
from .kernel_layouts import processed
from .mxfp4 import Mxfp4
from .mxfp8 import Mxfp8Layers
from .nvfp4 import Nvfp4
from .reload import attributes_of, follow_parameters

_FORMATS: tuple[PackedFormat, ...] = (Nvfp4(), Mxfp4(), Mxfp8Layers(), Int4Layers())


class KernelState:
    """What kernels of packed layers hold beside the parameters, which refits bring up to date where it is.

    It is looked for in each refit, since vLLM's own reload puts other tensors in its place and leaves the parameters where they are.

    Args:
        modules: the layers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [(live, known) for live in modules for known in _FORMATS if known.kind(live)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Once per refit, after the parameters are made; on a GPU, enqueued on the current stream."""
        clear_workspaces(holder for live, _ in self._layers for holder in attributes_of(live))
        for live, known in self._layers:
            follow_parameters(live, known.computed_with(live))


class VllmPackedLayers(PackedLayers):
    """Those of one vLLM model.

    Args:
        vllm_config: of the worker.
        device: of the live parameters.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(_FORMATS, device)
        self._vllm_config = vllm_config

    def _stepped(self, live: nn.Module, given: dict[str, nn.Parameter]) -> nn.Module:
        live = _with_own_kernel(live)
        method = live.quant_method
        method = apart(method) if isinstance(method, nn.Module) else copy.copy(method)
        # Under the dtype under which vLLM's own loader ran the step: MXFP8's takes scales through it.
        with set_default_torch_dtype(self._vllm_config.model_config.dtype):
            module = processed(live, method, given, self._vllm_config, self._device)
        require_none_beside(vars_and_buffers(live), vars_and_buffers(module), WORKSPACE)
        return module

    def _unused(self, live: nn.Module) -> Iterable[str]:
        return unused_of(live)


def _with_own_kernel(live: nn.Module) -> nn.Module:
    """A copy of a module whose step after loading changes no kernel of the live one: compressed-tensors' have a workspace in it."""
    module: Any = apart(live)
    scheme = getattr(live, "scheme", None)
    if scheme is not None:
        module.scheme = copy.copy(scheme)
        if hasattr(scheme, "kernel"):
            module.scheme.kernel = copy.copy(scheme.kernel)
    return module
