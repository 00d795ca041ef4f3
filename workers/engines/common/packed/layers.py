"""Layers that an engine holds as codes and scales: what it makes of them after loading, and made anew by refits where it is.

Each format says in a module of its own which layers of an engine are known and what becomes of their tensors. What is common to them:

- codes and scales land in the live parameters as a checkpoint has them, and what is computed with beside them. Layers that have
  landed are put in their kernel's order many at a time, in the live memory: CUDA graphs stay valid, and no Python runs for each
  tensor. Padding, which no checkpoint has, is zeros before that, as the engine has it;
- a kernel's order is found out by the engine's own step on numbers of elements. For each kind of layer what is made here is compared
  with what that step makes of random tensors, bit for bit; a layer of which that is not true takes the engine's own way, with the
  reason.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from .....integration.layout.codes import Codes, find_codes, tiled
from .....integration.layout.rearrangement import NotFoundOut, NotRearranged
from ..loader_trace.modules import ModuleLayout
from .making import Making, Order, PackedForm, Padded, Shapes, Tensors

# Marlin's locks, which are zeros between its runs.
WORKSPACE = "workspace"
# NaN in every float of one byte.
_POISON = 0x7F


@dataclass(frozen=True)
class PackedLayout(ModuleLayout):
    """Of a module that may be a packed layer.

    Attributes:
        packed: how it is made of packed tensors that have landed; None if they are used as they land.
    """

    packed: PackedForm | None = None


class PackedFormat(Protocol):
    """What is known of one format's layers."""

    def kind(self, live: nn.Module) -> str:
        """By which known method a module holds the format; empty if by none."""

    def kernel(self, live: Any) -> str:
        """Which known kernel computes with a layer.

        Raises:
            NotRearranged: another one does.
        """

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        """The parameters that a kernel may have in an order of its own, and those of them whose bytes it also changes by their
        layer's largest one."""

    def padding(
        self, live: Any, loaded: Shapes, kernel: str
    ) -> tuple[Mapping[str, Padded], Mapping[str, int]]:
        """Which parameters the kernel pads, and the attributes of a layer for which it would pad none: they come in its sizes."""

    def form(self, live: Any, loaded: Shapes, kernel: str, orders: Mapping[str, Order]) -> PackedForm:
        """How a layer is made of what is loaded, but for what is held then."""

    def given(self, loaded: Shapes, device: torch.device) -> Iterable[dict[str, torch.Tensor]]:
        """Tensors, one set after the other, on which what is made here is compared with what the engine makes."""

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        """By parameter the tensors that the layer's kernel holds."""


class PackedLayers(ABC):
    """The packed layers of one model. Those of the same shapes and kernel are asked about once.

    Args:
        formats: that are known.
        device: of the live parameters.
    """

    def __init__(self, formats: Sequence[PackedFormat], device: torch.device) -> None:
        self._formats = formats
        self._device = device
        self._known: dict[Hashable, PackedForm | str] = {}

    @abstractmethod
    def _stepped(self, live: nn.Module, given: dict[str, nn.Parameter]) -> nn.Module:
        """A copy of a module with ``given`` in the place of its parameters, after the engine's step on them; the live one stays as it is.

        Raises:
            NotRearranged: the step failed, or made other tensors beside the parameters.
            torch.OutOfMemoryError: the device has too little memory for it.
        """

    @abstractmethod
    def _unused(self, live: nn.Module) -> Iterable[str]:
        """Those of a module's own parameters that nothing computes with, as they are loaded."""

    def of(self, live: nn.Module, twin: nn.Module) -> PackedForm | None:
        """How a module is made of what is loaded.

        Args:
            live: the module, after the engine has processed it.
            twin: its untouched twin, whose parameters need no storage.

        Returns:
            None of a module that no known method holds packed.

        Raises:
            NotRearranged: the engine does something else with it; says what.
        """
        for known in self._formats:
            kind = known.kind(live)
            if kind:
                try:
                    return self._of(live, twin, kind, known)
                except AttributeError as error:
                    raise NotRearranged(
                        f"this engine has other layers than those that were read: {error}"
                    ) from error
        return None

    def _of(self, live: Any, twin: nn.Module, kind: str, format: PackedFormat) -> PackedForm:
        kernel = format.kernel(live)
        loaded = {name: (tuple(p.shape), p.dtype) for name, p in twin.named_parameters(recurse=False)}
        key = kind, kernel, live.params_dtype, *loaded.items()
        known = asked_once(self._known, key, lambda: self._found_out(live, twin, loaded, kernel, format))
        if known.held != _strided(held(live)):
            raise NotRearranged("other weights of these shapes do not become what the live ones are")
        return known

    def _found_out(
        self, live: Any, twin: nn.Module, loaded: Shapes, kernel: str, format: PackedFormat
    ) -> PackedForm:
        padded, sizes = format.padding(live, loaded, kernel)
        # The order of what is padded is that of a layer which is loaded in the padded sizes.
        whole = apart(live)
        for attribute, size in sizes.items():
            setattr(whole, attribute, size)
        laid = {
            name: (padded[name].shape if name in padded else shape, dtype)
            for name, (shape, dtype) in loaded.items()
        }

        def step(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self._processed(whole, twin, given, format)

        orders = self._orders(step, laid, *format.asked(whole, laid, kernel, self._device))
        form = replace(format.form(live, loaded, kernel, orders), padded=padded)
        for given in format.given(loaded, self._device):
            theirs = self._processed(
                live, twin, {name: tensor.clone() for name, tensor in given.items()}, format
            )
            form = form.holding(_strided(theirs))
            self._prove(form, given, theirs, frozenset(self._unused(live)))
        return form

    def _orders(
        self,
        step: Callable[[dict[str, torch.Tensor]], Tensors],
        loaded: Shapes,
        asked: Mapping[str, Codes],
        changed: frozenset[str],
    ) -> dict[str, Order]:
        """Where a kernel's step puts packed tensors, of those that it moves or changes."""
        if not asked:
            return {}

        def beside() -> dict[str, torch.Tensor]:
            return {
                name: torch.ones(shape, dtype=kind, device=self._device)
                for name, (shape, kind) in loaded.items()
                if name not in asked
            }

        found = {}
        for name, by in find_codes(step, asked, beside, self._device).items():
            if by.kept and name not in changed:
                continue
            firsts, tiling = tiled(by, asked[name].bits)
            if firsts != tuple(range(0, prod(by.shape), prod(by.shape[-2:]))):
                raise NotRearranged(f"the matrices of {name} change places")
            found[name] = Order(asked[name].bits, tiling, name in changed)
        return found

    def _prove(self, form: PackedForm, given: Tensors, theirs: Tensors, unused: frozenset[str]) -> None:
        """What is made by ``form`` is what the engine has made, but for parameters that nothing computes with."""
        # Some have two names.
        memory = {tensor.data_ptr(): torch.empty_like(tensor) for tensor in theirs.values()}
        made = {name: memory[tensor.data_ptr()] for name, tensor in theirs.items()}
        for tensor in made.values():
            tensor.view(-1).view(torch.uint8).fill_(_POISON)
        try:
            making = Making({"": (made, form)}, self._device)
            for name, tensor in given.items():
                if name in unused:
                    continue
                target = making.landing("", name)
                target = made[name] if target is None else target
                if name in form.padded:
                    target = form.padded[name].loaded(target)
                target.copy_(tensor.view(target.shape))
            making.make()
        except (KeyError, RuntimeError, ValueError) as error:
            raise NotRearranged(f"what it becomes can't be made: {type(error).__name__}: {error}") from error
        wrong = [
            name
            for name, tensor in theirs.items()
            if name not in unused and not torch.equal(_bytes(tensor), _bytes(made[name]))
        ]
        if wrong:
            raise NotRearranged(
                f"the engine makes another {wrong[0]} of what is loaded than was read in its code"
            )

    def _processed(
        self, live: nn.Module, twin: nn.Module, given: Tensors, format: PackedFormat
    ) -> dict[str, torch.Tensor]:
        """What the engine makes of ``given`` in the place of the live parameters."""
        module = self._stepped(
            live, {name: _like(twin.get_parameter(name), tensor) for name, tensor in given.items()}
        )
        made = held(module)
        for name, tensor in format.computed_with(module).items():
            # The live kernel may have copies of a reload of the engine's, which are kept equal.
            if tensor is None or name not in made or tensor.data_ptr() != made[name].data_ptr():
                raise NotRearranged(f"its kernel computes with something else than {name}")
        return made


def asked_once[Found](known: dict[Hashable, Found | str], key: Hashable, find: Callable[[], Found]) -> Found:
    """What was found out about a kind of layer, or is now.

    Args:
        known: what is known by kind, or why nothing is: not the error, whose traceback would keep the tensors that were asked with.
        key: the kind.
        find: finds it out.

    Raises:
        NotRearranged: nothing can be; says why.
        NotFoundOut: nothing can be with the memory that is left.
    """
    found = known.get(key)
    if found is None:
        try:
            found = known[key] = find()
        except NotRearranged as reason:
            found = known[key] = str(reason)
        except torch.OutOfMemoryError:
            # Nothing is known of the kind: when it is asked again there may be more memory.
            pass
    if found is None:
        # Not above, where the error that is handled would keep the tensors that were asked with.
        raise NotFoundOut(
            "the device has too little memory left to find out what the engine makes of it: several times that of one such layer; "
            "start the engine with less memory for its cache (vLLM's gpu_memory_utilization, SGLang's mem_fraction_static)"
        )
    if isinstance(found, str):
        raise NotRearranged(found)
    return found


def vars_and_buffers(module: nn.Module) -> dict[str, Any]:
    """What a module has by its name beside its parameters and modules: buffers and plain attributes."""
    return {**vars(module), **module._buffers}


def require_none_beside(live: Mapping[str, Any], made: Mapping[str, Any], known: str = "") -> None:
    """Check that the engine's step gave a copy of a layer no other tensor beside its parameters.

    Args:
        live: attributes of the layer, or of what computes for it.
        made: those of its copy, after the step.
        known: the name of one that it may have.

    Raises:
        NotRearranged: it has one, which may be made of the weights.
    """
    beside = {
        name
        for name, value in made.items()
        if isinstance(value, torch.Tensor) and value is not live.get(name)
    }
    if unknown := beside - {known}:
        raise NotRearranged(f"the engine makes {min(unknown)} beside its parameters")


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """The data of a module's own parameters."""
    return {name: p.data for name, p in module._parameters.items() if p is not None}


def apart[T: nn.Module](module: T) -> T:
    """A copy that has the same tensors and modules, which others can take the place of in the copy alone."""
    copied = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(copied)[name] = dict(vars(copied)[name])
    return copied


def clear_workspaces(holders: Iterable[Mapping[str, Any]]) -> None:
    """Fill Marlin's locks with zeros, as they are between its runs: after a sleep that drops the weights they are undefined memory.

    Args:
        holders: attributes of what may have some, by name.
    """
    workspaces = [holder[WORKSPACE] for holder in holders if WORKSPACE in holder]
    # torch takes no empty list.
    if workspaces:
        torch._foreach_zero_(workspaces)


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    """A tensor as the engine's own kind of parameter, which tells kernels its dimensions."""
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), tensor, False)
    vars(made).update(vars(parameter))
    return made


def _strided(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
