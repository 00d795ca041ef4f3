"""A live vLLM model as the destination of a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig

from ....integration.errors import RefitError
from ....integration.quantize.formats import Format
from ....integration.weights.manifest import TensorSpec
from ..common.traced_destination import Routes, Traced, TracedDestination
from .compat import FP8, SPECULATIVE, require_supported_vllm
from .completeness import absent_elements, check_complete, unused_parameters
from .drafters import check_drafter, check_follows
from .fp8 import BlockFp8, block_modules, tell_of_own_quantizers, uses_fp8
from .layouts import VllmLayout, module_layout
from .reload import ScopedReload, refresh_derived_state
from .twin import meta_twin


@dataclass(frozen=True)
class VllmRoutes(Routes):
    """Of a vLLM worker; ``misc`` loads what takes the misc path."""

    misc: ScopedReload


class VllmDestination(TracedDestination[VllmRoutes, VllmLayout, BlockFp8]):
    """What one vLLM worker wants of each checkpoint tensor, and how it takes the rest.

    Args:
        model: the live model, as the worker's ``get_model()`` returns it.
        vllm_config: the worker's configuration.
        device: where the model's parameters live.
        reset_caches: called at the end of every refit, for caches in the worker that depend on weights.
            The prefix cache belongs to the scheduler: the driver resets it (``llm.reset_prefix_cache()``).

    Raises:
        RefitError: the engine moves or wraps weights behind its loader's back.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        device: torch.device,
        reset_caches: Sequence[Callable[[], None]] = (),
    ) -> None:
        _check_supported(model, vllm_config)
        self._live = model
        self._vllm_config = vllm_config
        self._reset_caches = tuple(reset_caches)
        super().__init__(device)

    @property
    def gives_memory_back(self) -> bool:
        """Whether vLLM has its sleep mode, whose pool unmaps the weights."""
        return bool(self._vllm_config.model_config.enable_sleep_mode)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`TracedDestination.quantized`; the log tells of modules that hold another FP8 than blocks."""
        tell_of_own_quantizers(self._model)
        return super().quantized(specs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The misc path: full checkpoint tensors through vLLM's own loader.

        May be called several times in one refit; the tensors may be reused after the call.

        Raises:
            RefitError: :meth:`fragments` was not called before, a tensor came twice, or the loader failed.
        """
        self._agreed().misc.load(weights)

    def abandon(self) -> None:
        """After a refit that failed between its first write and :meth:`finish`: undo what is half loaded.

        Modules under reload get their old kernel tensors back, so that the next refit starts clean. Bytes
        that were written in place stay; the engine must not generate before a refit commits.
        """
        if self._routes is not None:
            self._routes.misc.abandon()

    @property
    def _model(self) -> nn.Module:
        return self._live

    def _twin(self) -> AbstractContextManager[nn.Module]:
        return meta_twin(self._model, self._vllm_config)

    def _blocks(self) -> dict[str, BlockFp8]:
        return block_modules(self._model)

    def _layout(self, name: str, live: nn.Module, twin: nn.Module, promised: bool) -> VllmLayout:
        return module_layout(name, live, twin, promised)

    def _check(self, traced: Traced[VllmLayout, BlockFp8]) -> None:
        check_follows(self._vllm_config, traced.trace)
        check_complete(
            traced.trace,
            traced.owners,
            self._model,
            traced.after,
            unused=unused_parameters(self._model),
            dummy=self._vllm_config.load_config.load_format == "dummy",
        )

    def _routed(self, traced: Traced[VllmLayout, BlockFp8], shared: Routes) -> VllmRoutes:
        required: dict[str, set[str]] = {}
        for name in shared.reasons:
            for parameter in traced.trace.touched[name]:
                for module in traced.owners[parameter]:
                    if traced.layouts[module].reload:
                        required.setdefault(module, set()).add(name)
        if traced.trace.unknown:
            # One of these may reach any module that cannot be loaded in place.
            for module, layout in traced.layouts.items():
                if layout.reload:
                    required.setdefault(module, set())
        live = dict(self._model.named_modules())
        misc = ScopedReload(
            self._model,
            self._vllm_config,
            self._device,
            {module: live[module] for module in required},
            {module: frozenset(names) for module, names in required.items()},
            traced.placed(shared.landings),
            absent_elements(self._model, traced.trace),
        )
        return VllmRoutes(**vars(shared), misc=misc)

    def _post_load(self, routes: VllmRoutes) -> None:
        routes.misc.finish()
        with self._device, torch.no_grad():
            refresh_derived_state(self._model, self._vllm_config.model_config.dtype)
        for reset in self._reset_caches:
            reset()


def _check_supported(model: nn.Module, vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.enable_eplb:
        raise RefitError(
            "enable_eplb moves experts between ranks while serving, so where the loader puts an expert is not "
            "where it is used, and a refit would overwrite other experts; start vLLM without enable_eplb",
            stage="trace",
        )
    if getattr(model, "_do_torchao_reload", False):
        raise RefitError(
            "torchao quantization reloads the whole model in every load_weights call, which cannot be combined "
            "with a refit in parts; use FP8 or no quantization in the engine",
            stage="trace",
        )
    if uses_fp8(model):
        require_supported_vllm(FP8)
    if vllm_config.speculative_config is not None:
        require_supported_vllm(SPECULATIVE)
    check_drafter(vllm_config)
