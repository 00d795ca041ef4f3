"""Layers of a vLLM model whose weights are packed: what vLLM makes of them after loading, found out and proved.

A method's own module says which layers it holds, by which kernels, and what is read in their code (:mod:`.nvfp4`, :mod:`.mxfp8`). Where
a kernel puts codes and scales is found out by vLLM's own step on numbers of elements. For each kind of layer what refits make
(:mod:`.nvfp4_making`) is compared with what that step makes of random tensors, bit for bit; a layer of which that is not true takes
vLLM's reload, with the reason.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_default_torch_dtype

from ....integration.layout.codes import Codes, Letters, find_codes, tiled
from ....integration.layout.rearrangement import NotRearranged
from .kernel_layouts import apart, held, processed
from .layouts import has_padding
from .nvfp4_making import Derived, Making, Order, PackedForm, Shapes, Tensors

# Marlin's, which holds nothing of weights.
_WORKSPACE = "workspace"
# NaN in every float of one byte.
_POISON = 0x7F


class PackedLayers(ABC):
    """The packed layers of one model, of one method. Those of the same shapes and kernel are asked about once.

    Args:
        vllm_config: of the worker.
        device: of the live parameters.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._known: dict[tuple[Any, ...], PackedForm | NotRearranged] = {}

    @abstractmethod
    def _kind(self, live: nn.Module) -> str:
        """Which of the method's layers a live module is; empty if it is none."""

    @abstractmethod
    def _kernel(self, live: Any) -> str:
        """Which known kernel computes with a layer.

        Raises:
            NotRearranged: another one does.
        """

    @abstractmethod
    def _codes(self, loaded: Shapes, kernel: str, dtype: torch.dtype) -> dict[str, Codes]:
        """How numbers are written into those parameters that the kernel may have in an order of its own.

        Args:
            loaded: shape and dtype of all parameters as they are loaded.
            kernel: as :meth:`_kernel` says.
            dtype: in which the layer computes.

        Raises:
            NotRearranged: nothing is known of what it makes of such layers.
        """

    @abstractmethod
    def _staged(self, loaded: Shapes) -> tuple[str, ...]:
        """Those parameters that land beside the model."""

    @abstractmethod
    def _derived(self, loaded: Shapes, kernel: str, kind: str) -> Iterator[Derived]:
        """What becomes of the parameters that land beside the model."""

    @abstractmethod
    def _noise(self, loaded: Shapes) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors as they are loaded, of all that may come."""

    def _held_by_kernel(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        """What the kernel of a layer holds itself and has to be a parameter of the layer, by that one's name."""
        return {}

    def of(self, live: nn.Module, twin: nn.Module) -> PackedForm | None:
        """How a module is made of what is loaded.

        Args:
            live: the module, after vLLM has processed it.
            twin: its untouched twin, whose parameters need no storage.

        Returns:
            None of a module that is none of the method's.

        Raises:
            NotRearranged: vLLM does something else with it; says what.
        """
        kind = self._kind(live)
        if not kind:
            return None
        try:
            return self._of(live, twin, kind)
        except AttributeError as error:
            raise NotRearranged(f"this vLLM has other layers than those that were read: {error}") from error

    def _of(self, live: Any, twin: nn.Module, kind: str) -> PackedForm:
        kernel = self._kernel(live)
        if has_padding(live):
            raise NotRearranged("its experts are padded with elements that no refit brings")
        loaded = {name: (tuple(p.shape), p.dtype) for name, p in twin.named_parameters(recurse=False)}
        key = kind, kernel, live.params_dtype, *loaded.items()
        if key not in self._known:
            try:
                self._known[key] = self._found_out(live, loaded, kernel, kind)
            except NotRearranged as reason:
                self._known[key] = reason
        known = self._known[key]
        if isinstance(known, NotRearranged):
            raise NotRearranged(str(known))
        if known.held != _strided(live):
            raise NotRearranged("other weights of these shapes do not become what the live ones are")
        self._require_own_tensors(live)
        return known

    def _found_out(self, live: nn.Module, loaded: Shapes, kernel: str, kind: str) -> PackedForm:
        step = partial(self._processed, live)
        orders = self._orders(step, loaded, self._codes(loaded, kernel, live.params_dtype))
        derived = tuple(self._derived(loaded, kernel, kind))
        staged = self._staged(loaded)
        if any(loaded[name][1] != torch.float32 for name in staged):
            raise NotRearranged("its global scales are not FP32")
        form = PackedForm(loaded, staged, orders, derived, live.params_dtype)
        for given in self._noise(loaded):
            theirs = step({name: tensor.clone() for name, tensor in given.items()})
            form = PackedForm(loaded, staged, orders, derived, live.params_dtype, _strided_of(theirs))
            self._prove(form, given, theirs)
        return form

    def _orders(
        self,
        step: Callable[[dict[str, torch.Tensor]], Tensors],
        loaded: Shapes,
        asked: Mapping[str, Codes],
    ) -> dict[str, Order]:
        """Where a kernel's step puts codes and block scales, of those that it moves."""
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
            codes = asked[name]
            mapped = isinstance(codes, Letters) and codes.letters != codes.become
            if by.kept and not mapped:
                continue
            firsts, tiling = tiled(by, codes.bits)
            if firsts != tuple(range(0, prod(by.shape), prod(by.shape[-2:]))):
                raise NotRearranged(f"the matrices of {name} change places")
            found[name] = Order(codes.bits, tiling, mapped)
        return found

    def _prove(self, form: PackedForm, given: Tensors, theirs: Tensors) -> None:
        """What is made by ``form`` is what vLLM has made."""
        held = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
        for tensor in held.values():
            tensor.view(-1).view(torch.uint8).fill_(_POISON)
        try:
            making = Making({"": (held, form)}, self._device)
            for name, tensor in given.items():
                target = making.landing("", name)
                (held[name] if target is None else target).copy_(tensor)
            making.make()
        except (KeyError, RuntimeError, ValueError) as error:
            raise NotRearranged(f"what it becomes can't be made: {type(error).__name__}: {error}") from error
        wrong = [
            name for name, tensor in theirs.items() if not torch.equal(_bytes(tensor), _bytes(held[name]))
        ]
        if wrong:
            raise NotRearranged(f"vLLM makes another {wrong[0]} of what is loaded than was read in its code")

    def _processed(self, live: nn.Module, given: Tensors) -> dict[str, torch.Tensor]:
        """What vLLM makes of ``given`` in the place of the live parameters."""
        method = live.quant_method
        method = apart(method) if isinstance(method, nn.Module) else copy.copy(method)
        # Under the dtype under which vLLM's own loader ran the step: MXFP8's takes scales through it.
        with set_default_torch_dtype(self._vllm_config.model_config.dtype):
            module = processed(live, method, given, self._vllm_config, self._device)
        beside = [
            name
            for name, value in (*vars(module).items(), *module._buffers.items())
            if isinstance(value, torch.Tensor) and value is not vars(live).get(name, live._buffers.get(name))
        ]
        if unknown := set(beside) - {_WORKSPACE}:
            raise NotRearranged(f"vLLM makes {min(unknown)} beside its parameters")
        return held(module)

    def _require_own_tensors(self, live: nn.Module) -> None:
        """Refuse layers whose kernel holds other tensors than the layer's parameters, as after a reload of vLLM's.

        Raises:
            NotRearranged: names one.
        """
        for name, tensor in self._held_by_kernel(live).items():
            parameter = live._parameters.get(name)
            if tensor is None or parameter is None or tensor.data_ptr() != parameter.data_ptr():
                raise NotRearranged(f"its kernel computes with a copy of {name}")


def _strided(live: nn.Module) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return _strided_of({name: p for name, p in live._parameters.items() if p is not None})


def _strided_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
