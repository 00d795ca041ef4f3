"""Layers that vLLM holds as codes and scales: what it makes of them after loading, and made anew by refits where it is.

Each format says in a module of its own (:mod:`.nvfp4`, :mod:`.mxfp4`, :mod:`.mxfp8`, :mod:`.int4`) which layers are known and what
becomes of their tensors. What is common to them:

- codes and scales land in the live parameters as a checkpoint has them, and what is computed with beside them. Layers that have
  landed are put in their kernel's order many at a time, in the live memory: CUDA graphs stay valid, and no Python runs for each
  tensor. Padding, which no checkpoint has, is zeros before that, as vLLM has it;
- a kernel's order is found out by vLLM's own step on numbers of elements. For each kind of layer what is made here is compared with
  what that step makes of random tensors, bit for bit; a layer of which that is not true takes vLLM's reload, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_default_torch_dtype

from ....integration.layout.codes import Codes, find_codes, tiled
from ....integration.layout.rearrangement import NotRearranged
from .completeness import unused_of
from .int4 import Int4Layers
from .kernel_layouts import apart, asked_once, held, processed, require_none_beside
from .mxfp4 import Mxfp4
from .mxfp8 import Mxfp8Layers
from .nvfp4 import Nvfp4
from .packed_making import Making, Order, PackedForm, Padded, Shapes, Tensors
from .reload import attributes_of, follow_parameters

# Marlin's locks, which are zeros between its runs.
_WORKSPACE = "workspace"
# NaN in every float of one byte.
_POISON = 0x7F


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
        """Tensors, one set after the other, on which what is made here is compared with what vLLM makes."""

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        """By parameter the tensors that the layer's kernel holds."""


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
        workspaces = [
            holder[_WORKSPACE]
            for live, _ in self._layers
            for holder in attributes_of(live)
            if _WORKSPACE in holder
        ]
        if workspaces:
            # After a sleep that drops the weights these are undefined memory, too.
            torch._foreach_zero_(workspaces)
        for live, known in self._layers:
            follow_parameters(live, known.computed_with(live))


class PackedLayers:
    """The packed layers of one model. Those of the same shapes and kernel are asked about once.

    Args:
        vllm_config: of the worker.
        device: of the live parameters.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._known: dict[Hashable, PackedForm | str] = {}

    def of(self, live: nn.Module, twin: nn.Module) -> PackedForm | None:
        """How a module is made of what is loaded.

        Args:
            live: the module, after vLLM has processed it.
            twin: its untouched twin, whose parameters need no storage.

        Returns:
            None of a module that no known method holds packed.

        Raises:
            NotRearranged: vLLM does something else with it; says what.
        """
        for known in _FORMATS:
            kind = known.kind(live)
            if kind:
                try:
                    return self._of(live, twin, kind, known)
                except AttributeError as error:
                    raise NotRearranged(
                        f"this vLLM has other layers than those that were read: {error}"
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
            self._prove(form, given, theirs, frozenset(unused_of(live)))
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
        """What is made by ``form`` is what vLLM has made, but for parameters that nothing computes with."""
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
            raise NotRearranged(f"vLLM makes another {wrong[0]} of what is loaded than was read in its code")

    def _processed(
        self, live: nn.Module, twin: nn.Module, given: Tensors, format: PackedFormat
    ) -> dict[str, torch.Tensor]:
        """What vLLM makes of ``given`` in the place of the live parameters."""
        live = _with_own_kernel(live)
        given = {name: _like(twin.get_parameter(name), tensor) for name, tensor in given.items()}
        method = live.quant_method
        method = apart(method) if isinstance(method, nn.Module) else copy.copy(method)
        # Under the dtype under which vLLM's own loader ran the step: MXFP8's takes scales through it.
        with set_default_torch_dtype(self._vllm_config.model_config.dtype):
            module = processed(live, method, given, self._vllm_config, self._device)
        require_none_beside(live, module, _WORKSPACE)
        made = held(module)
        for name, tensor in format.computed_with(module).items():
            # The live kernel may have copies of a reload of vLLM's, which KernelState keeps equal.
            if tensor is None or name not in made or tensor.data_ptr() != made[name].data_ptr():
                raise NotRearranged(f"its kernel computes with something else than {name}")
        return made


def _with_own_kernel(live: nn.Module) -> nn.Module:
    """A copy of a module whose step after loading changes no kernel of the live one: compressed-tensors' have a workspace in it."""
    module: Any = apart(live)
    scheme = getattr(live, "scheme", None)
    if scheme is not None:
        module.scheme = copy.copy(scheme)
        if hasattr(scheme, "kernel"):
            module.scheme.kernel = copy.copy(scheme.kernel)
    return module


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    """A tensor as vLLM's own kind of parameter, which tells kernels its dimensions."""
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), tensor, False)
    vars(made).update(vars(parameter))
    return made


def _strided(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
