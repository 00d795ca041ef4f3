"""A live vLLM model as the destination of a refit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import VllmConfig

from ....integration.errors import PlanError, RefitError
from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import storage_key
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.modules import owners_of, spread_over_modules
from ..common.loader_trace.quantized import formats_of, on_the_wire, promised_modules
from ..common.loader_trace.trace import Landing, LoaderTrace, Manifest, trace_loader
from .completeness import check_complete
from .derived import refresh_derived_state
from .drafters import check_drafter, check_follows
from .layouts import ModuleLayout, module_layout
from .quantized import block_modules, require_codes, tell_of_own_quantizers
from .reload import ScopedReload
from .routing_cost import warn_of_misc
from .twin import meta_twin
from .unused import absent_elements, unused_parameters

logger = logging.getLogger(__name__)

_Layout = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Routes:
    """What the trace of one manifest found, for parameters of one layout.

    Attributes:
        manifest: the traced one.
        layout: of the live parameters at that time.
        promised: what the trainer was asked to quantize.
        landings: of the tensors that are written in place.
        reasons: of the tensors that take the misc path.
        misc: that path.
    """

    manifest: Manifest
    layout: _Layout
    promised: dict[str, Format]
    landings: dict[str, tuple[Landing, ...]]
    reasons: dict[str, str]
    misc: ScopedReload

    def outdated(
        self, manifest: Manifest, parameters: Mapping[str, torch.Tensor], promised: dict[str, Format]
    ) -> bool:
        return self.manifest != manifest or self.layout != _layout_of(parameters) or self.promised != promised


class VllmDestination:
    """What one vLLM worker wants of each checkpoint tensor, and how it takes the rest.

    Args:
        model: the live model, as the worker's ``get_model()`` returns it.
        vllm_config: the worker's configuration.
        device: where the model's parameters live.
        reset_caches: called at the end of every refit, for caches in the worker that depend on weights.
            The prefix cache belongs to the scheduler: the driver resets it (``llm.reset_prefix_cache()``).

    Attributes:
        version: the version given to the last :meth:`finish`, or -1 before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        device: torch.device,
        reset_caches: Sequence[Callable[[], None]] = (),
    ) -> None:
        _check_supported(model, vllm_config)
        self.version = -1
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._reset_caches = tuple(reset_caches)
        self._follow_parameters()
        self._routes: Routes | None = None
        self._promised: dict[str, Format] = {}

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
        """Whether vLLM has its sleep mode, whose pool unmaps the weights."""
        return bool(self._vllm_config.model_config.enable_sleep_mode)

    def storage_key(self) -> Hashable:
        """Changes when a live parameter's storage moves, or when another tensor takes a parameter's place."""
        # Asked of the modules and not of tensors that were seen once: those may have been replaced since.
        return storage_key([held[name] for held, name in self._places])

    def new_epoch(self) -> None:
        """Forget what another trainer was asked for with :meth:`quantized`."""
        self._promised = {}

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """The weights of ``specs`` that this rank's parameters hold quantized, with their format.

        What is named here has to come in this format, codes under the weight's name and scales beside them, or the epoch
        has to end: modules whose kernels want special scales are written in place on the strength of it.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`, asked for codes and scales.
        """
        self._follow_parameters()
        tell_of_own_quantizers(self._model)
        blocks = block_modules(self._model)
        if not blocks:
            return {}
        with meta_twin(self._model, self._vllm_config) as twin:
            trace = trace_loader(twin.load_weights, _loadable(twin), specs)
        self._promised = formats_of(specs, trace, blocks)
        self._routes = self.routes(on_the_wire(specs, self._promised))
        return dict(self._promised)

    def fragments(self, manifest: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """Trace the engine's loader on a meta twin and return what this rank wants.

        The trace is kept: asked again for the same manifest, while the live parameters have the layout that they had,
        only the views are made anew.

        Args:
            manifest: checkpoint name, full shape and dtype of every tensor of a refit, of all routes.

        Returns:
            Fragments whose views alias the live parameters, in the manifest's order, and for every tensor
            that has to come whole through :meth:`load_weights` the reason. A tensor that this rank does
            not load (another pipeline stage, a remote expert, a tied head) is in neither.

        Raises:
            RefitMismatch: the engine's loader rejects a tensor.
            PlanError: no tensor of the manifest reaches a part of a parameter, which would keep its old
                weights; the live model lacks a module of its own architecture; or the manifest has MTP layers,
                and the engine drafts with its own.
        """
        self._follow_parameters()
        self._routes = self.routes(manifest)
        found = [
            landing.fragment(self._parameters[landing.parameter])
            for name, landings in self._routes.landings.items()
            for landing in landings
        ]
        return found, dict(self._routes.reasons)

    def routes(self, manifest: Manifest) -> Routes:
        """What :meth:`fragments` goes by; asking for it changes nothing for a refit that goes by another manifest."""
        wanted = tuple((name, tuple(shape), dtype) for name, shape, dtype in manifest)
        if self._routes is None or self._routes.outdated(wanted, self._parameters, self._promised):
            return self._traced(wanted)
        return self._routes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The misc path: full checkpoint tensors through the engine's own loader.

        May be called several times in one refit; the tensors may be reused after the call.

        Raises:
            RefitError: :meth:`fragments` was not called before, a tensor came twice, or the loader failed.
        """
        self._misc_or_raise().load(weights)

    def finish(self, version: int) -> None:
        """Post-load work, once per refit after all bytes have landed and all misc tensors were loaded.

        Raises:
            RefitError: a module that needs the engine's reload did not get all of its tensors.
        """
        self._misc_or_raise().finish()
        with self._device, torch.no_grad():
            refresh_derived_state(self._model, self._vllm_config.model_config.dtype)
        for reset in self._reset_caches:
            reset()
        self.version = version

    def abandon(self) -> None:
        """After a refit that failed between its first write and :meth:`finish`: undo what is half loaded.

        Modules under reload get their old kernel tensors back, so that the next refit starts clean. Bytes
        that were written in place stay; the engine must not generate before a refit commits.
        """
        if self._routes is not None:
            self._routes.misc.abandon()

    def _follow_parameters(self) -> None:
        self._parameters = dict(self._model.named_parameters())
        self._places = [
            (module._parameters, name)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _traced(self, manifest: Manifest) -> Routes:
        with meta_twin(self._model, self._vllm_config) as twin:
            fresh = dict(twin.named_parameters())  # the loader may replace some while it runs
            trace = trace_loader(twin.load_weights, _loadable(twin), manifest)
            check_follows(self._vllm_config, trace)
            require_codes(trace, manifest, fresh)
            parameters = {name for name, _ in twin.named_parameters()}
            owners = owners_of(twin)
            blocks = block_modules(self._model)
            layouts = self._layouts(
                twin,
                {module for modules in owners.values() for module in modules},
                promised_modules(trace, blocks, self._promised),
            )
        reasons = spread_over_modules(
            trace, owners, {name: found.reason for name, found in layouts.items() if not found.direct}
        )
        dummy = self._vllm_config.load_config.load_format == "dummy"
        unused = unused_parameters(self._model)
        check_complete(trace, owners, self._model, parameters, unused=unused, dummy=dummy)
        trace = _after_swaps(trace, fresh, layouts)
        landings = {name: found for name, found in trace.landings.items() if name not in reasons and found}
        logger.info(
            "refit destination: %d fragments of %d tensors are written in place, %d tensors take the misc path",
            sum(map(len, landings.values())),
            len(landings),
            len(reasons),
        )
        warn_of_misc(manifest, reasons)
        misc = self._misc_path(trace, owners, layouts, reasons)
        return Routes(
            tuple(manifest), _layout_of(self._parameters), dict(self._promised), landings, reasons, misc
        )

    def _misc_or_raise(self) -> ScopedReload:
        if self._routes is None:
            raise RefitError(
                "fragments(manifest) has to be called once before weights are loaded: it finds the modules "
                "that need the engine's reload",
                stage="misc",
            )
        return self._routes.misc

    def _layouts(
        self, twin: nn.Module, modules: set[str], promised: frozenset[str]
    ) -> dict[str, ModuleLayout]:
        live = dict(self._model.named_modules())
        absent = sorted(modules - live.keys())
        if absent:
            raise PlanError(
                f"the live model has no module {absent[0]} ({len(absent)} are absent), though its architecture "
                "defines it: something wrapped or replaced it after loading (LoRA does). Refit needs the "
                "model as vLLM loads it; start the engine without the feature that changes modules.",
                stage="trace",
                parameter=absent[0],
            )
        return {
            name: module_layout(name, live[name], twin.get_submodule(name), name in promised)
            for name in sorted(modules)
        }

    def _misc_path(
        self,
        trace: LoaderTrace,
        owners: dict[str, frozenset[str]],
        layouts: dict[str, ModuleLayout],
        reasons: dict[str, str],
    ) -> ScopedReload:
        required: dict[str, set[str]] = {}
        for name in reasons:
            for parameter in trace.touched[name]:
                for module in owners[parameter]:
                    if layouts[module].reload:
                        required.setdefault(module, set()).add(name)
        if trace.unknown:
            # One of these may reach any module that cannot be loaded in place.
            for module, layout in layouts.items():
                if layout.reload:
                    required.setdefault(module, set())
        live = dict(self._model.named_modules())
        placed = {
            name: landings
            for name, landings in trace.landings.items()
            if name not in reasons and any(layouts[m].placed for at in landings for m in owners[at.parameter])
        }
        return ScopedReload(
            self._model,
            self._vllm_config,
            self._device,
            {module: live[module] for module in required},
            {module: frozenset(names) for module, names in required.items()},
            placed,
            absent_elements(self._model, trace),
        )


def _loadable(twin: nn.Module) -> dict[str, torch.Tensor]:
    return dict(twin.named_parameters()) | dict(twin.named_buffers())


def _layout_of(parameters: Mapping[str, torch.Tensor]) -> _Layout:
    """What decides where a landing lies in the parameters."""
    return {name: (p.shape, p.stride(), p.dtype) for name, p in parameters.items()}


def _check_supported(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Refuse engines whose weights move or are wrapped behind the loader's back, or that compute with others beside them."""
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
    check_drafter(vllm_config)


def _after_swaps(
    trace: LoaderTrace, parameters: Mapping[str, torch.Tensor], layouts: Mapping[str, ModuleLayout]
) -> LoaderTrace:
    """The landings where vLLM moved them after loading."""
    swapped = {f"{module}.{parameter}" for module, layout in layouts.items() for parameter in layout.swapped}
    landings = {
        name: tuple(
            at.in_the_other_half(parameters[at.parameter]) if at.parameter in swapped else at for at in found
        )
        for name, found in trace.landings.items()
    }
    return replace(trace, landings=landings)
