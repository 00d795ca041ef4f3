"""A live vLLM or SGLang model as the destination of a refit: what both engines share.

The engine's loader is traced once on a twin of the model without storage (:mod:`.loader_trace`). The trace tells, for each
checkpoint tensor, which part of which live parameter it fills. Tensors whose bytes can't be written in place take the misc
path: full tensors through the engine's own loader. What an engine does on that path and after it is its own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, cast

import torch
from torch import nn

from ....integration.errors import PlanError, RefitError
from ....integration.layout import Fragment
from ....integration.layout.rearrangement import Rearrangement
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import StorageLook
from ....integration.weights.manifest import TensorSpec
from ...drafter_names import of_drafter, without_drafter
from .loader_trace.modules import ModuleLayout, owners_of, spread_over_modules
from .loader_trace.quantized import HoldsCodes, formats_of, on_the_wire, promised_modules, require_codes
from .loader_trace.trace import Landing, LoaderTrace, Manifest, Zeros, copies_among, trace_loader

logger = logging.getLogger(__name__)

# Routers, norms and biases stay below this share of the bytes; experts, or all linear layers of a quantized engine, don't.
_LARGE_SHARE = 0.05
_Strided = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Routes:
    """The way that each tensor of one manifest takes, for live parameters of one layout.

    Attributes:
        manifest: the traced one.
        layout: shape, strides and dtype of the live parameters at that time.
        promised: the formats that the trainer was asked to quantize weights into.
        landings: of the tensors that are written in place.
        zeros: what holds zeros on this rank of tensors that do not come by :meth:`load_weights`.
        copies: where a box lands, and where it stands again: keys that are values too (Gemma 4).
        reasons: of the tensors that take the misc path.
        for_now: modules of which the next epoch finds out anew how they take new weights.
    """

    manifest: Manifest
    layout: _Strided
    promised: dict[str, Format]
    landings: dict[str, tuple[Landing, ...]]
    zeros: tuple[Zeros, ...]
    copies: tuple[tuple[Landing, Landing], ...]
    reasons: dict[str, str]
    for_now: tuple[str, ...]

    def outdated(
        self, manifest: Manifest, parameters: Mapping[str, torch.Tensor], promised: dict[str, Format]
    ) -> bool:
        """Whether the trace has to be made anew."""
        return self.manifest != manifest or self.layout != _strided(parameters) or self.promised != promised


@dataclass(frozen=True)
class Traced[Layout: ModuleLayout, Blocks: HoldsCodes]:
    """One manifest traced through the engine's loader.

    Attributes:
        manifest: checkpoint name, full shape and dtype of every tensor.
        trace: where each of them lands in the live parameters.
        owners: for each parameter or buffer the modules that hold it.
        layouts: by module.
        blocks: modules of the live model that hold weights quantized.
        promised: those of them that get nothing but what the trainer was asked for.
        before: the twin's parameters as they were before its loader ran, which may replace some.
        after: names of its parameters after that.
    """

    manifest: Manifest
    trace: LoaderTrace
    owners: dict[str, frozenset[str]]
    layouts: dict[str, Layout]
    blocks: dict[str, Blocks]
    promised: frozenset[str]
    before: dict[str, torch.Tensor]
    after: frozenset[str]

    def placed(self, landings: Mapping[str, tuple[Landing, ...]]) -> dict[str, tuple[Landing, ...]]:
        """Those of ``landings`` that the engine's loader can't write."""
        return {
            name: found
            for name, found in landings.items()
            if any(self.layouts[module].placed for at in found for module in self.owners[at.parameter])
        }


class TracedDestination[Found: Routes, Layout: ModuleLayout, Blocks: HoldsCodes](ABC):
    """What one worker wants of each checkpoint tensor.

    Args:
        device: where the live parameters are.

    Attributes:
        version: the version given to the last :meth:`finish`, or -1 before the first.
    """

    # By which the trainer is told to make FP8 blocks.
    _quantize_setting: ClassVar[str] = "policy.refit.trainer_quantize_fp8=true"

    def __init__(self, device: torch.device) -> None:
        self.version = -1
        self._device = device
        self._routes: Found | None = None
        self._promised: dict[str, Format] = {}
        # Whether routes are made anew, since there may be more memory by now.
        self._again = False
        self._look = StorageLook()
        # The last question of quantized(), with the modules that it depends on, and the answer.
        self._asked: tuple[Manifest, dict[str, Blocks]] | None = None
        self._answer: dict[str, Format] = {}
        self._told_of_drafter = False
        self._follow_parameters()

    @property
    @abstractmethod
    def _model(self) -> nn.Module:
        """The live model."""

    @abstractmethod
    def _twin(self) -> AbstractContextManager[nn.Module]:
        """A second model for this rank without storage, as it is before its weights are loaded."""

    @abstractmethod
    def _blocks(self) -> dict[str, Blocks]:
        """The modules of the live model that hold weights as codes and scales which a trainer makes, by name."""

    @abstractmethod
    def _layout(self, name: str, live: nn.Module, twin: nn.Module, promised: bool) -> Layout:
        """How the live module ``name`` takes new weights; ``promised`` as of :class:`Traced`."""

    @abstractmethod
    def _check(self, traced: Traced[Layout, Blocks]) -> None:
        """Refuse what this engine can't take.

        Raises:
            PlanError: names the first parameter.
        """

    @abstractmethod
    def _routed(self, traced: Traced[Layout, Blocks], shared: Routes) -> Found:
        """``shared`` with what this engine keeps beside it."""

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """:meth:`load_weights` of the live model's own weights."""

    @abstractmethod
    def _post_load(self, routes: Found) -> None:
        """Bring up to date what the engine derives from weights."""

    @abstractmethod
    def abandon(self) -> None:
        """After a refit that failed: undo what is half loaded. Bytes that were written stay."""

    @property
    def has_trainable_drafter(self) -> bool:
        """Whether the engine has a drafter that takes the weights of one which is trained beside the policy."""
        return False

    @property
    def device(self) -> torch.device:
        """Where the live parameters are."""
        return self._device

    @property
    def kept_bytes(self) -> int:
        """Bytes of the live parameters of this rank."""
        return sum(p.numel() * p.element_size() for p in self._parameters.values())

    def storage_key(self) -> Hashable:
        """Changes when a live parameter's storage moves, or when another tensor takes a parameter's place."""
        # Asked of the modules and not of tensors that were seen once: those may have been replaced since.
        return self._look.key(held[name] for held, name in self._places)

    def new_epoch(self) -> None:
        """Forget what another trainer was asked for with :meth:`quantized`, and routes that were made for want of memory."""
        self._promised = {}
        self._again = self._routes is not None and bool(self._routes.for_now)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """The weights of ``specs`` that this rank's parameters hold as codes and scales, with their format.

        What is named here has to come in this format, or the epoch
        has to end: modules whose kernels want special scales are written in place on the strength of it.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`, asked for codes and scales.
        """
        self._follow_parameters()
        blocks = self._blocks()
        if not blocks:
            return {}
        specs = [*without_drafter(specs)]
        asked = _plain(specs), blocks
        if self._asked != asked:
            with self._built_twin() as twin:
                trace = self._trace_unquantized(twin, asked[0])
            self._promised = formats_of(specs, trace, blocks)
            self.agree(on_the_wire(specs, self._promised))
            self._asked, self._answer = asked, dict(self._promised)
        self._promised = dict(self._answer)
        return dict(self._answer)

    def fragments(self, specs: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """Trace the engine's loader and return what this rank wants.

        The trace is kept: asked again for the same manifest, while the live parameters have the layout that they had,
        only the views are made anew.

        Args:
            specs: checkpoint name, full shape and dtype of every tensor of a refit, of all routes.

        Returns:
            Fragments whose views alias the live parameters, in the manifest's order, and for every tensor
            that has to come whole through :meth:`load_weights` the reason. A tensor that this rank does
            not load (another pipeline stage, a remote expert, a tied head) is in neither.

        Raises:
            RefitMismatch: the engine's loader rejects a tensor.
            PlanError: a part of a parameter would keep its old weights; the live model lacks a module of its own
                architecture; or a module can't be given new weights.
        """
        routes = self.agree(specs)
        found = [
            landing.fragment(self._target(landing))
            for landings in routes.landings.values()
            for landing in landings
        ]
        return found, dict(routes.reasons)

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """As :meth:`~rlrefit.integration.weights.endpoints.TellsWhatItRewrites.rewritten`.

        Modules whose weights the engine makes anew after a load, or copies, or scales, take the misc path, and no module takes
        both. So what is written in place stays, but where an engine says otherwise.
        """
        return {}

    def agree(self, specs: Manifest) -> Found:
        """Have refits go by the routes of ``specs`` from here on, and return them.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`.
        """
        self._follow_parameters()
        self._routes, self._again = self.routes(specs), False
        self._tell_of_drafter([name for name, *_ in specs if of_drafter(name)])
        return self._routes

    def routes(self, specs: Manifest) -> Found:
        """The way that each tensor of ``specs`` would take; a refit that goes by another manifest is not affected.

        A trained drafter's have none: it is a model beside this one.
        """
        manifest = _plain(without_drafter(specs))
        routes = self._routes
        if routes is None or self._again or routes.outdated(manifest, self._parameters, self._promised):
            return self._traced(manifest)
        return routes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The misc path: full checkpoint tensors through the engine's own loader.

        May be called several times in one refit; the tensors may be reused after the call.

        Raises:
            RefitError: :meth:`fragments` was not called before, or a tensor can't be taken.
        """
        # A trained drafter's come with the model's, and no loader of a model's knows their names.
        self._load(without_drafter(weights))

    def finish(self, version: int) -> None:
        """Post-load work, once per refit after all bytes have landed and all misc tensors were loaded.

        Raises:
            RefitError: :meth:`fragments` was not called before, or a module did not get all that it needs.
        """
        routes = self._agreed()
        for zeros in routes.zeros:
            zeros.fill(self._target(zeros))
        for first, again in routes.copies:
            again.place(self._target(again)).copy_(first.place(self._target(first)))
        self._post_load(routes)
        self.version = version

    def _tell_of_drafter(self, drafted: Sequence[str]) -> None:
        """Log a warning, once, that a trained drafter's weights come for nothing."""
        if drafted and not self.has_trainable_drafter and not self._told_of_drafter:
            self._told_of_drafter = True
            logger.warning(
                "the trainer sends a drafter that it trains beside the policy (%d weights, the first is %s), and this engine has none that "
                "takes them: they are left out, and if it drafts, fewer tokens are accepted as the policy moves. vLLM takes them with "
                "method eagle or eagle3 in speculative_config, without parallel_drafting; SGLang with speculative_algorithm EAGLE3 or EAGLE "
                "and a head at speculative_draft_model_path",
                len(drafted),
                drafted[0],
            )

    def _agreed(self) -> Found:
        if self._routes is None:
            raise RefitError(
                "fragments(specs) has to be called once before weights are loaded: it finds out where they go",
                stage="misc",
            )
        return self._routes

    def _target(self, place: Landing | Zeros) -> torch.Tensor:
        """The tensor that has the layout of the place's parameter as it is loaded."""
        return self._parameters[place.parameter]

    def _follow_parameters(self) -> None:
        self._parameters = {name: p for name, p in self._model.named_parameters() if self._is_own(p)}
        self._places = [
            (module._parameters, name)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and self._is_own(parameter)
        ]

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether the live model shares a tensor with no other one that is given its weights."""
        return True

    def _traced(self, manifest: Manifest) -> Found:
        absent = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if absent:
            raise PlanError(
                f"the live parameter has no memory ({len(absent)} have none): something keeps the weights elsewhere and brings them for each "
                "step, where no refit reaches them. Nothing was written; start the engine without offloading",
                stage="trace",
                parameter=absent[0],
            )
        blocks = self._blocks()
        with self._built_twin() as twin:
            before = dict(twin.named_parameters())
            trace = self._trace(twin, manifest)
            require_codes(trace, manifest, before, self._quantize_setting)
            others = self._held_by_others(twin)
            owners = {name: found for name, found in owners_of(twin).items() if name not in others}
            promised = promised_modules(trace, blocks, self._promised)
            layouts = self._layouts(twin, {m for modules in owners.values() for m in modules}, promised)
            after = frozenset(name for name, _ in twin.named_parameters()) - others
        trace = self._placing(trace.leaving_buffers(before))
        moved = {p for p, modules in owners.items() if any(layouts[module].placed for module in modules)}
        trace = _after_swaps(trace.once(moved), before, layouts)
        trace, layouts, reasons = self._ways(trace, before, owners, layouts)
        traced = Traced(manifest, trace, owners, layouts, blocks, promised, before, after)
        self._check(traced)
        apart = {
            name: copies_among(found)
            for name, found in trace.landings.items()
            if name not in reasons and found
        }
        landings = {name: firsts for name, (firsts, _) in apart.items()}
        copies = tuple(pair for _, found in apart.values() for pair in found)
        logger.info(
            "refit destination: %d fragments of %d tensors are written in place, %d tensors take the misc path",
            sum(map(len, landings.values())),
            len(landings),
            len(reasons),
        )
        warn_of_misc(manifest, reasons)
        for_now = tuple(module for module, found in layouts.items() if found.for_now)
        if for_now:
            logger.warning(
                "refit destination: %d modules (the first is %s) take the misc path in this epoch, since the device had too little memory left to "
                "find out what the engine makes of them. The next epoch finds out anew: free memory of the device and have the ranks meet again",
                len(for_now),
                for_now[0],
            )
        zeros = tuple(at for name, found in trace.zeros.items() if name not in reasons for at in found)
        layout = _strided(self._parameters)
        shared = Routes(manifest, layout, dict(self._promised), landings, zeros, copies, reasons, for_now)
        return self._routed(traced, shared)

    @contextmanager
    def _built_twin(self) -> Iterator[nn.Module]:
        with ExitStack() as stack:
            try:
                twin = stack.enter_context(self._twin())
            except RefitError:
                raise
            # Of any kind: it is whatever the engine's own code asks of tensors without values.
            except Exception as error:
                raise PlanError(
                    f"where the loader of {type(self._model).__name__} puts weights can't be found out, since the model can't be built without "
                    f"memory ({type(error).__name__}: {error}). Nothing was written. No refit of such a model is taken; leave out what the "
                    "engine was started with beyond its defaults, or serve it by another engine",
                    stage="trace",
                ) from error
            yield twin

    def _trace(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        loadable = dict(twin.named_parameters()) | dict(twin.named_buffers())
        return trace_loader(twin.load_weights, loadable, manifest).without(self._held_by_others(twin))

    def _trace_unquantized(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        """The same of weights none of which is quantized, whatever the engine holds."""
        return self._trace(twin, manifest)

    def _held_by_others(self, twin: nn.Module) -> frozenset[str]:
        """Names of parameters and buffers that the live model shares with another one, which is given their weights."""
        return frozenset()

    def _placing(self, trace: LoaderTrace) -> LoaderTrace:
        """The trace where those of its ``wider`` and ``again`` are written in place to which this engine sees itself."""
        return trace

    def _unneeded(self, trace: LoaderTrace, layouts: Mapping[str, Layout]) -> dict[str, str]:
        """Tensors that no module needs while it takes new weights by ``layouts``, each with the module that it is loaded into."""
        return {}

    def _ways(
        self,
        trace: LoaderTrace,
        parameters: Mapping[str, torch.Tensor],
        owners: Mapping[str, frozenset[str]],
        layouts: dict[str, Layout],
    ) -> tuple[LoaderTrace, dict[str, Layout], dict[str, str]]:
        """As :func:`_routed`, of what is needed."""
        unneeded = self._unneeded(trace, layouts)
        while True:
            needed = replace(
                trace,
                landings={n: () if n in unneeded else found for n, found in trace.landings.items()},
                misc_reasons={n: r for n, r in trace.misc_reasons.items() if n not in unneeded},
            )
            # What is not needed must not have a module's other tensors take another way with it.
            found = _routed(needed, parameters, owners, layouts, unneeded)
            still = {n: module for n, module in unneeded.items() if found[1][module] is layouts[module]}
            if still == unneeded:
                return found
            unneeded = still

    def _layouts(self, twin: nn.Module, modules: set[str], promised: frozenset[str]) -> dict[str, Layout]:
        live = dict(self._model.named_modules())
        absent = sorted(modules - live.keys())
        if absent:
            raise PlanError(
                f"the live model has no module {absent[0]} ({len(absent)} are absent), though its architecture "
                "defines it: something wrapped or replaced it after loading (LoRA does). Refit needs the "
                "model as the engine loads it; start the engine without the feature that changes modules.",
                stage="trace",
                parameter=absent[0],
            )
        return {
            name: self._layout(name, live[name], twin.get_submodule(name), name in promised)
            for name in sorted(modules)
        }


def warn_of_misc(manifest: Manifest, reasons: Mapping[str, str]) -> None:
    """Log a warning where more than a twentieth of the bytes of ``manifest`` take the misc path, with the main reason.

    Args:
        manifest: checkpoint name, full shape and dtype of every tensor.
        reasons: of the tensors that take that path.
    """
    sizes = {name: prod(shape) * dtype.itemsize for name, shape, dtype in manifest}
    total = sum(sizes.values())
    by_reason: Counter[str] = Counter()
    for name, reason in reasons.items():
        layer, colon, why = reason.partition(": ")
        # Without the layer, so that equal causes count together.
        by_reason[why if colon and layer.startswith("layer ") else reason] += sizes[name]
    misc = by_reason.total()
    if misc <= _LARGE_SHARE * total:
        return
    [(reason, size)] = by_reason.most_common(1)
    logger.warning(
        "refit destination: %.0f%% of the weights (%.1f MB of %.1f) cannot be written in place by this engine: every "
        "refit sends them whole to each of its ranks and loads them through the engine, which is slower. %.1f MB of them "
        "because %s",
        100 * misc / total,
        misc / 1e6,
        total / 1e6,
        size / 1e6,
        reason,
    )


def _plain(specs: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Manifest:
    return tuple((name, tuple(shape), dtype) for name, shape, dtype in specs)


def _strided(parameters: Mapping[str, torch.Tensor]) -> _Strided:
    """What decides where a landing lies in the parameters."""
    return {name: (p.shape, p.stride(), p.dtype) for name, p in parameters.items()}


def _routed[Layout: ModuleLayout](
    trace: LoaderTrace,
    parameters: Mapping[str, torch.Tensor],
    owners: Mapping[str, frozenset[str]],
    layouts: Mapping[str, Layout],
    unneeded: Collection[str] = (),
) -> tuple[LoaderTrace, dict[str, Layout], dict[str, str]]:
    """The landings where the engine put them after loading, how modules take new weights, and why tensors take the misc path.

    The loader can't write a module whose elements the engine put elsewhere. So if one of its tensors can't be written there, all of
    them come as they would if nothing were known of the new places.
    """
    moved = {
        name: tuple(_moved(at, parameters, layouts) for at in landings)
        for name, landings in trace.landings.items()
    }
    # One rank sees a weight by the same axes everywhere.
    unplaced = {
        name
        for name, landings in moved.items()
        if None in landings or len({at.axes for at in landings if at is not None}) > 1
    }
    failed = {
        module for name in unplaced for parameter in trace.touched[name] for module in owners[parameter]
    }
    # Zeros are filled where they are as loaded.
    filled = (zeros.parameter for found in trace.zeros.values() for zeros in found)
    failed |= {module for name in filled if _rearranged(name, layouts) for module in owners[name]}
    if trace.unknown:
        # One of these may reach any module.
        failed |= layouts.keys()
    found = dict(layouts)
    while True:
        for module in failed:
            otherwise = found[module].otherwise
            if otherwise is not None:
                found[module] = cast(Layout, otherwise)
        blocked = {name: layout.reason for name, layout in found.items() if layout.reason}
        separable = {name for name, layout in found.items() if layout.separable}
        reasons = spread_over_modules(trace, owners, blocked, separable)
        reasons = {name: reason for name, reason in reasons.items() if name not in unneeded}
        loaded = {
            module for name in reasons for parameter in trace.touched[name] for module in owners[parameter]
        }
        failed = {module for module in loaded if found[module].otherwise is not None}
        if not failed:
            break
    landings = {
        name: trace.landings[name] if name in reasons else tuple(at for at in to if at is not None)
        for name, to in moved.items()
    }
    return replace(trace, landings=landings), found, reasons


def _moved(
    at: Landing, parameters: Mapping[str, torch.Tensor], layouts: Mapping[str, ModuleLayout]
) -> Landing | None:
    """A landing where the engine put its elements after loading; None if that is no box."""
    by = _rearranged(at.parameter, layouts)
    return at if by is None else at.rearranged(parameters[at.parameter], by)


def _rearranged(name: str, layouts: Mapping[str, ModuleLayout]) -> Rearrangement | None:
    module, _, parameter = name.rpartition(".")
    layout = layouts.get(module)
    return None if layout is None else layout.rearranged.get(parameter)


def _after_swaps(
    trace: LoaderTrace, parameters: Mapping[str, torch.Tensor], layouts: Mapping[str, ModuleLayout]
) -> LoaderTrace:
    """The landings where the engine moved them after loading."""
    swapped = {f"{module}.{parameter}" for module, layout in layouts.items() for parameter in layout.swapped}
    landings = {
        name: tuple(
            at.in_the_other_half(parameters[at.parameter]) if at.parameter in swapped else at for at in found
        )
        for name, found in trace.landings.items()
    }
    return replace(trace, landings=landings)
