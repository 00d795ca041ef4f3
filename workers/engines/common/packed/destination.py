"""A live model with packed layers as the destination of a refit: what engines share of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from .....integration.layout import Box
from .....integration.weights.manifest import TensorSpec
from ..loader_trace.quantized import HoldsCodes
from ..loader_trace.trace import Landing, LoaderTrace, Manifest, Zeros
from ..traced_destination import Routes, TracedDestination
from .int4 import Int4Weights, accepting_unquantized, require_packed
from .layers import PackedLayout
from .making import Making, PackedForm


@dataclass(frozen=True)
class PackedRoutes(Routes):
    """Of a worker whose model may have packed layers.

    Attributes:
        packed: modules that are made of packed tensors that land in place.
    """

    packed: dict[str, PackedForm]


class PackedDestination[Found: PackedRoutes, Layout: PackedLayout, Blocks: HoldsCodes](
    TracedDestination[Found, Layout, Blocks]
):
    """What one worker wants of each checkpoint tensor, where its model may have packed layers."""

    # By which the trainer is told to make INT4.
    _int4_setting: ClassVar[str] = "policy.refit.trainer_quantize_int4=true"

    def __init__(self, device: torch.device) -> None:
        # Of the routes that refits go by, and where the parameters that it writes are.
        self._making: Making | None = None
        self._expects: tuple[Making, Mapping[str, int]] | None = None
        self._made_at: Hashable = None
        super().__init__(device)

    @abstractmethod
    def _int4(self) -> Mapping[str, Int4Weights]:
        """The modules of the live model that hold INT4 as a trainer makes it, by name."""

    @abstractmethod
    def _kind_of_matrices(self) -> Callable[..., nn.Parameter]:
        """The engine's class of parameters for matrices that are not quantized."""

    @abstractmethod
    def _follow_packed(self, modules: Iterable[nn.Module]) -> None:
        """Remember the live packed layers, of which a kernel may hold more than the parameters."""

    @abstractmethod
    def _idle(self) -> frozenset[str]:
        """Names of the live model's parameters that nothing computes with, as they are before it is processed."""

    def _padding(self, routes: Found) -> Mapping[tuple[str, str], Sequence[Box]]:
        """By module and parameter those boxes of packed layers in which nothing lands, as they are loaded."""
        return {}

    def agree(self, specs: Manifest) -> Found:
        """As :meth:`TracedDestination.agree`; prepares what makes packed layers of what lands."""
        before, routes = self._routes, super().agree(specs)
        held = {
            module: {
                name: p.data
                for name, p in self._model.get_submodule(module)._parameters.items()
                if p is not None
            }
            for module in routes.packed
        }
        places = tuple([tensor.data_ptr() for tensors in held.values() for tensor in tensors.values()])
        if routes is not before or places != self._made_at:
            self._made_at = places
            modules = {module: (held[module], form) for module, form in routes.packed.items()}
            self._making = Making(modules, self._device, self._padding(routes)) if modules else None
            self._follow_packed(map(self._model.get_submodule, modules))
        return routes

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """As :meth:`TracedDestination.rewritten`; what is put in a kernel's order does not stay as it lands."""
        if self._making is None:
            return {}
        reasons = {
            spec.name: self._making.rewrites(*split_name(at.parameter))
            for spec in specs
            for at in self._agreed().landings.get(spec.name, ())
        }
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def works_on_portions(self) -> bool:
        """Whether there are packed layers that a kernel wants in an order of its own."""
        return self._making is not None and self._making.orders

    def expect(self, portions: Mapping[str, int]) -> None:
        """As :meth:`~rlrefit.integration.weights.endpoints.WorksOnPortions.expect`; prepares what puts packed layers in order."""
        if self._making is None or (self._making, portions) == self._expects:
            return
        self._expects = self._making, portions
        routes = self._agreed()
        # Zeros are written at the end.
        last: dict[str, int | None] = dict.fromkeys(split_name(zeros.parameter)[0] for zeros in routes.zeros)
        for name, landings in routes.landings.items():
            portion = portions.get(name)
            for module in {split_name(landing.parameter)[0] for landing in landings}:
                before = last.setdefault(module, portion)
                last[module] = None if before is None or portion is None else max(before, portion)
        self._making.expect({module: portion for module, portion in last.items() if portion is not None})

    def landed(self, portion: int) -> None:
        """Put the packed layers in order that have landed whole with a portion."""
        assert self._making is not None, "it is told what to expect before"
        with self._device, torch.no_grad():
            self._making.put_in_order(portion)

    def abandon(self) -> None:
        """What was put in order of a refit that failed counts for nothing; bytes that were written in place stay."""
        if self._making is not None:
            self._making.abandon()

    def _trace(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        with accepting_unquantized(twin, self._int4(), self._kind_of_matrices()) as taken:
            trace = super()._trace(twin, manifest)
        require_packed(trace, manifest, taken, self._int4_setting)
        return trace.without(taken)

    def _trace_unquantized(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        with accepting_unquantized(twin, self._int4(), self._kind_of_matrices()):
            return super()._trace(twin, manifest)

    def _unneeded(self, trace: LoaderTrace, layouts: Mapping[str, Layout]) -> dict[str, str]:
        """Of packed layers what fills nothing but parameters that nothing computes with."""
        idle = self._idle()
        found = {}
        for name, touched in trace.touched.items():
            modules = {split_name(parameter)[0] for parameter in touched}
            if touched and touched <= idle and all(m in layouts and layouts[m].packed for m in modules):
                found[name] = min(modules)
        return found

    def _target(self, place: Landing | Zeros) -> torch.Tensor:
        packed = None if self._making is None else self._making.landing(*split_name(place.parameter))
        return super()._target(place) if packed is None else packed

    def _make_packed(self) -> None:
        """Make packed layers of what has landed, of those that are not made yet."""
        if self._making is not None:
            with self._device, torch.no_grad():
                self._making.make()


def packed_forms(layouts: Mapping[str, PackedLayout]) -> dict[str, PackedForm]:
    """By module how packed layers are made."""
    return {name: layout.packed for name, layout in layouts.items() if layout.packed is not None}


def split_name(name: str) -> tuple[str, str]:
    """A parameter's module, and its name there."""
    module, _, parameter = name.rpartition(".")
    return module, parameter
