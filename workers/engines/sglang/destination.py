"""A live SGLang model as the destination of a refit."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_loader.loader import device_loading_context
from torch import nn

from ....integration.errors import PlanError, RefitError
from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import storage_key
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.modules import owners_of, spread_over_modules
from ..common.loader_trace.quantized import formats_of, on_the_wire, promised_modules
from ..common.loader_trace.trace import Landing, LoaderTrace, Manifest, trace_loader
from .completeness import check_codes, check_complete, check_loadable
from .fp8 import BlockFp8
from .layouts import ModuleLayout, module_layout
from .quantized import block_modules, follow_scales, staged_scales
from .twin import meta_twin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routes:
    """What the trace of one manifest found.

    Attributes:
        manifest: the traced one.
        promised: what the trainer was asked to quantize.
        landings: of the tensors that are written in place.
        reasons: of the tensors that take the misc path.
        placed: landings of tensors that SGLang's loader can't write, whichever path they take.
        processed: modules that SGLang has to process after new weights were loaded into them.
        blocks: modules that hold FP8 blocks.
        as_promised: those of them that get nothing but what the trainer was asked for.
    """

    manifest: Manifest
    promised: dict[str, Format]
    landings: dict[str, tuple[Landing, ...]]
    reasons: dict[str, str]
    placed: dict[str, tuple[Landing, ...]]
    processed: tuple[str, ...]
    blocks: dict[str, BlockFp8]
    as_promised: frozenset[str]


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
        self._promised: dict[str, Format] = {}
        # The last question of :meth:`quantized`, with what answers it, and the answer.
        self._asked: tuple[Manifest, dict[str, BlockFp8]] | None = None
        self._own: dict[str, Format] = {}
        self._staged: dict[str, torch.Tensor] = {}
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

    def new_epoch(self) -> None:
        """Forget what another trainer was asked for with :meth:`quantized`."""
        self._promised = {}

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """The weights of ``specs`` that this rank's parameters hold in FP8 blocks, with their format.

        What is named here has to come in this format, codes under the weight's name and scales beside them, or the epoch
        has to end: scales that the engine computes with in another form are made on the strength of it.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`, asked for codes and scales.
        """
        self._follow_parameters()
        blocks = block_modules(self._model)
        if not blocks:
            return {}
        asked = _manifest(specs), blocks
        if self._asked == asked:
            self._promised = dict(self._own)
            return dict(self._own)
        with meta_twin(self._runner) as twin:
            trace = _trace(twin, asked[0])
        self._promised = formats_of(specs, trace, blocks)
        self._agreed(on_the_wire(specs, self._promised))
        self._asked, self._own = asked, dict(self._promised)
        return dict(self._promised)

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        """Trace SGLang's loader on a meta twin and return what this rank wants; the trace is kept.

        Raises:
            RefitMismatch: the loader rejects a tensor.
            PlanError: a part of a parameter would keep its old weights, or a module can't be given new ones.
        """
        self._follow_parameters()
        routes = self._agreed(specs)
        found = [
            landing.fragment(self._target(landing))
            for landings in routes.landings.values()
            for landing in landings
        ]
        return found, dict(routes.reasons)

    def routes(self, specs: Sequence[TensorSpec]) -> Routes:
        """What :meth:`finish` goes by where all of ``specs`` come as full tensors, and none shard to shard.

        SGLang's own loader may be given them in the place of :meth:`load_weights` if none is ``placed``.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`.
        """
        self._follow_parameters()
        return self._agreed(specs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The misc path: full checkpoint tensors through the model's own ``load_weights``, as SGLang's updates do."""
        with torch.no_grad():
            self._model.load_weights(self._loaded_by_sglang(weights))

    def finish(self, version: int) -> None:
        """Post-load work, once per refit after all bytes have landed and all misc tensors were loaded.

        Raises:
            RefitError: :meth:`fragments` or :meth:`routes` was not called before.
        """
        if self._routes is None:
            raise RefitError("no weights were agreed on before they were finished", stage="post_load")
        routes, modules = self._routes, dict(self._model.named_modules())
        with torch.no_grad():
            for name in routes.processed:
                with device_loading_context(modules[name], self._device):
                    modules[name].quant_method.process_weights_after_loading(modules[name])
            for name, facts in routes.blocks.items():
                follow_scales(name, modules[name], facts, self._staged, name in routes.as_promised)
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

    def _target(self, landing: Landing) -> torch.Tensor:
        """What has the form in which the landing's parameter is loaded."""
        return self._staged.get(landing.parameter, self._parameters[landing.parameter])

    def _loaded_by_sglang(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is left of ``weights`` when those that SGLang's loader can't write are where they belong."""
        placed: Mapping[str, tuple[Landing, ...]] = {} if self._routes is None else self._routes.placed
        for name, tensor in weights:
            if name not in placed:
                yield name, tensor
                continue
            for landing in placed[name]:
                part = tensor[tuple(slice(start, stop) for start, stop in landing.box)]
                landing.fragment(self._target(landing)).view.copy_(part)

    def _agreed(self, specs: Sequence[TensorSpec]) -> Routes:
        """The trace of ``specs``, made anew where it is of others."""
        manifest = _manifest(specs)
        if (
            self._routes is None
            or self._routes.manifest != manifest
            or self._routes.promised != self._promised
        ):
            self._routes = self._traced(manifest)
        return self._routes

    def _traced(self, manifest: Manifest) -> Routes:
        blocks = block_modules(self._model)
        with meta_twin(self._runner) as twin:
            parameters = dict(twin.named_parameters())
            trace = _trace(twin, manifest)
            check_codes(trace, manifest, parameters)
            owners = owners_of(twin)
            layouts = self._layouts(twin, {m for modules in owners.values() for m in modules})
            self._staged = staged_scales(blocks, self._parameters, parameters, self._staged)
        check_loadable(trace, owners, layouts)
        reasons = spread_over_modules(
            trace, owners, {name: found.reason for name, found in layouts.items() if found.reason}
        )
        check_complete(trace, parameters)
        landings = {name: found for name, found in trace.landings.items() if name not in reasons and found}
        loaded = {m for name in reasons for p in trace.touched[name] for m in owners[p]}
        processed = tuple(sorted(module for module in loaded if layouts[module].processed))
        placed = {
            name: found
            for name, found in trace.landings.items()
            if any(layouts[m].placed for at in found for m in owners[at.parameter])
        }
        logger.info(
            "refit destination: %d fragments of %d tensors are written in place, %d tensors take the misc path",
            sum(map(len, landings.values())),
            len(landings),
            len(reasons),
        )
        return Routes(
            manifest,
            dict(self._promised),
            landings,
            reasons,
            placed,
            processed,
            blocks,
            promised_modules(trace, blocks, self._promised),
        )

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


def _manifest(specs: Sequence[TensorSpec]) -> Manifest:
    return tuple((name, tuple(shape), dtype) for name, shape, dtype in specs)


def _trace(twin: nn.Module, manifest: Manifest) -> LoaderTrace:
    return trace_loader(
        twin.load_weights, dict(twin.named_parameters()) | dict(twin.named_buffers()), manifest
    )
