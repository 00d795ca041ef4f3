"""A live SGLang model as the destination of a refit."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_loader.loader import device_loading_context
from torch import nn

from ...integration.endpoints import storage_key
from ...integration.errors import PlanError, RefitError
from ...integration.layout import Fragment
from ...integration.manifest import TensorSpec
from ..loader_trace.modules import owners_of, spread_over_modules
from ..loader_trace.trace import Landing, Manifest, trace_loader
from .completeness import check_codes, check_complete, check_loadable
from .layouts import ModuleLayout, module_layout
from .twin import meta_twin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routes:
    """What the trace of one manifest found.

    Attributes:
        manifest: the traced one.
        landings: of the tensors that are written in place.
        reasons: of the tensors that take the misc path.
        processed: modules that SGLang has to process after new weights were loaded into them.
    """

    manifest: Manifest
    landings: dict[str, tuple[Landing, ...]]
    reasons: dict[str, str]
    processed: tuple[str, ...]


class SglangDestination:
    """What one SGLang worker wants of each checkpoint tensor, and how it takes the rest.

    Args:
        runner: the worker's ``ModelRunner``, its model loaded.
        device: where the parameters live.

    Attributes:
        version: the version given to the last :meth:`finish`, or -1 before the first.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self.version = -1
        self._runner = runner
        self._device = device
        self._routes: Routes | None = None
        self._follow_parameters()

    @property
    def device(self) -> torch.device:
        """Where the live parameters are."""
        return self._device

    @property
    def kept_bytes(self) -> int:
        """Bytes of the live parameters of this rank."""
        return sum(p.numel() * p.element_size() for p in self._parameters.values())

    @property
    def gives_memory_back(self) -> bool:
        """Whether SGLang lets its memory saver unmap the weights."""
        return bool(self._runner.server_args.enable_memory_saver)

    def storage_key(self) -> Hashable:
        """Changes when a live parameter's storage moves, or when another tensor takes a parameter's place."""
        return storage_key([held[name] for held, name in self._places])

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        """Trace SGLang's loader on a meta twin and return what this rank wants; the trace is kept.

        Raises:
            RefitMismatch: the loader rejects a tensor.
            PlanError: a part of a parameter would keep its old weights, or a module can't be given new ones.
        """
        self._follow_parameters()
        routes = self.routes(specs)
        found = [
            landing.fragment(self._parameters[landing.parameter])
            for landings in routes.landings.values()
            for landing in landings
        ]
        return found, dict(routes.reasons)

    def routes(self, specs: Sequence[TensorSpec]) -> Routes:
        """What :meth:`fragments` goes by."""
        manifest = tuple((name, tuple(shape), dtype) for name, shape, dtype in specs)
        if self._routes is None or self._routes.manifest != manifest:
            self._routes = self._traced(manifest)
        return self._routes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The misc path: full checkpoint tensors through the model's own ``load_weights``, as SGLang's updates do."""
        with torch.no_grad():
            self._model.load_weights(weights)

    def finish(self, version: int) -> None:
        """Post-load work, once per refit after all bytes have landed and all misc tensors were loaded.

        Raises:
            RefitError: :meth:`fragments` or :meth:`routes` was not called before.
        """
        if self._routes is None:
            raise RefitError("no weights were agreed on before they were finished", stage="post_load")
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            for name in self._routes.processed:
                with device_loading_context(modules[name], self._device):
                    modules[name].quant_method.process_weights_after_loading(modules[name])
            # What a model derives from its weights (latent attention's absorbed projections).
            if hasattr(self._model, "post_load_weights"):
                self._model.post_load_weights()
        self.version = version

    def abandon(self) -> None:
        """Nothing waits half loaded: what was written stays, and the engine must not generate before a refit commits."""

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._runner.model
        return model

    def _follow_parameters(self) -> None:
        self._parameters = dict(self._model.named_parameters())
        self._places = [
            (module._parameters, name)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _traced(self, manifest: Manifest) -> Routes:
        with meta_twin(self._runner) as twin:
            parameters = dict(twin.named_parameters())
            trace = trace_loader(twin.load_weights, parameters | dict(twin.named_buffers()), manifest)
            check_codes(trace, manifest, parameters)
            owners = owners_of(twin)
            layouts = self._layouts(twin, {m for modules in owners.values() for m in modules})
        check_loadable(trace, owners, layouts)
        reasons = spread_over_modules(
            trace, owners, {name: found.reason for name, found in layouts.items() if found.reason}
        )
        check_complete(trace, parameters)
        landings = {name: found for name, found in trace.landings.items() if name not in reasons and found}
        loaded = {m for name in reasons for p in trace.touched[name] for m in owners[p]}
        processed = tuple(sorted(module for module in loaded if layouts[module].processed))
        logger.info(
            "refit destination: %d fragments of %d tensors are written in place, %d tensors take the misc path",
            sum(map(len, landings.values())),
            len(landings),
            len(reasons),
        )
        return Routes(manifest, landings, reasons, processed)

    def _layouts(self, twin: nn.Module, names: set[str]) -> dict[str, ModuleLayout]:
        live = dict(self._model.named_modules())
        absent = sorted(names - live.keys())
        if absent:
            raise PlanError(
                f"the live model has no module {absent[0]} ({len(absent)} are absent), though its architecture defines it: "
                "something replaced it after loading (LoRA does). Start the engine without the feature that changes modules",
                stage="trace",
                parameter=absent[0],
            )
        return {name: module_layout(name, live[name], twin.get_submodule(name)) for name in sorted(names)}
