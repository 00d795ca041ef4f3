"""Layers that vLLM's ModelOpt methods hold in NVFP4: what vLLM makes of them after loading, and made anew by refits where it is.

This was read in vLLM 0.21 (``quantization/modelopt.py``, ``kernels/linear/nvfp4``, ``fused_moe/oracle/nvfp4.py`` and
``utils/marlin_utils_fp4.py``). Of what a checkpoint has of a layer

- codes and block scales keep their bytes and places in the emulation. Marlin puts both in an order of its own, in as many bytes. It
  makes other bytes of the scales, too: their numbers times a power of two that depends on the largest one of the layer;
- global scales become other parameters: the largest of the parts of a matrix, its inverse, products, and for Marlin that less the
  power of two.

So codes and scales land in the live parameters as a checkpoint has them, and global scales beside the model. Once all have landed,
orders and global scales are made for all layers together, in the live memory: CUDA graphs stay valid, and no Python runs for each
tensor. Marlin's order is found out by vLLM's own step on numbers of elements. For each kind of layer what is made here is compared
with what that step makes of random tensors, bit for bit; a layer of which that is not true takes vLLM's reload, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from ....integration.layout.codes import Codes, Letters, Nibbles, find_codes, tiled
from ....integration.layout.rearrangement import NotRearranged
from .compat import kind_of
from .kernel_layouts import apart, held, processed
from .layouts import has_padding
from .nvfp4_making import Derived, Formula, Making, Order, PackedForm, Shapes, Tensors, marlins_maps

# By name: an engine without such layers imports none of these.
_MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
_W4A4_LINEAR = f"{_MODELOPT}.ModelOptNvFp4LinearMethod"
_W4A16_LINEAR = f"{_MODELOPT}.ModelOptNvFp4W4A16LinearMethod"
_EXPERTS = f"{_MODELOPT}.ModelOptNvFp4FusedMoE"
_KERNELS = "vllm.model_executor.kernels.linear.nvfp4"
_EMULATION, _MARLIN = "emulation", "marlin"
_LINEAR_KERNELS = {
    f"{_KERNELS}.emulation.EmulationNvFp4LinearKernel": _EMULATION,
    f"{_KERNELS}.marlin.MarlinNvFp4LinearKernel": _MARLIN,
}
# Not the emulation's: vLLM's loader writes the scale of an expert's inputs twice, from two tensors.
_EXPERT_BACKENDS = {"MARLIN": _MARLIN}
# Marlin's, which holds nothing of weights.
_WORKSPACE = "workspace"
# Of E4M3's numbers from 256 to 448: the largest there are, so that Marlin's factor is 1.
_LETTERS = tuple(range(0x78, 0x7F))
# NaN in every float of one byte.
_POISON = 0x7F


class PackedLayers:
    """The packed layers of one model. Those of the same shapes and kernel are asked about once.

    Args:
        vllm_config: of the worker.
        device: of the live parameters.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._known: dict[tuple[Any, ...], PackedForm | NotRearranged] = {}

    def of(self, live: nn.Module, twin: nn.Module) -> PackedForm | None:
        """How a module is made of what is loaded.

        Args:
            live: the module, after vLLM has processed it.
            twin: its untouched twin, whose parameters need no storage.

        Returns:
            None of a module that no known method holds in NVFP4.

        Raises:
            NotRearranged: vLLM does something else with it; says what.
        """
        kind = kind_of(getattr(live, "quant_method", None))
        if kind not in (_W4A4_LINEAR, _W4A16_LINEAR, _EXPERTS):
            return None
        try:
            return self._of(live, twin, kind)
        except AttributeError as error:
            raise NotRearranged(f"this vLLM has other layers than those that were read: {error}") from error

    def _of(self, live: Any, twin: nn.Module, kind: str) -> PackedForm:
        kernel = _kernel(live.quant_method)
        if has_padding(live):
            raise NotRearranged("its experts are padded with elements that no refit brings")
        loaded = {name: (tuple(p.shape), p.dtype) for name, p in twin.named_parameters(recurse=False)}
        key = kind, kernel, live.params_dtype, *loaded.items()
        if key not in self._known:
            try:
                self._known[key] = self._found_out(live, loaded, kernel)
            except NotRearranged as reason:
                self._known[key] = reason
        known = self._known[key]
        if isinstance(known, NotRearranged):
            raise NotRearranged(str(known))
        if known.held != _strided(live):
            raise NotRearranged("other weights of these shapes do not become what the live ones are")
        _require_own_tensors(live)
        return known

    def _found_out(self, live: nn.Module, loaded: Shapes, kernel: str) -> PackedForm:
        step = partial(self._processed, live)
        orders = {} if kernel == _EMULATION else self._orders(step, loaded, live.params_dtype)
        staged = tuple(n for n in loaded if n.endswith(("weight_scale_2", "input_scale")))
        if any(loaded[name][1] != torch.float32 for name in staged):
            raise NotRearranged("its global scales are not FP32")
        kind = kind_of(live.quant_method)
        derived = tuple(_of_experts(loaded) if kind == _EXPERTS else _of_linear(loaded, kernel, kind))
        form = PackedForm(loaded, staged, orders, derived, live.params_dtype)
        for seed, largest in enumerate((0x7E, 0x2F, 0x01)):
            given = _noise(loaded, largest, seed, self._device)
            theirs = step({name: tensor.clone() for name, tensor in given.items()})
            form = PackedForm(loaded, staged, orders, derived, live.params_dtype, _strided_of(theirs))
            self._prove(form, given, theirs)
        return form

    def _orders(
        self, step: Callable[[dict[str, torch.Tensor]], Tensors], loaded: Shapes, dtype: torch.dtype
    ) -> dict[str, Order]:
        """Where a kernel's step puts codes and block scales."""
        if any(name.endswith("bias") for name in loaded):
            raise NotRearranged("it has a bias, which Marlin puts in another order, too")
        become = tuple(marlins_maps(dtype, self._device).maps[0][list(_LETTERS)].tolist())
        asked: dict[str, Codes] = {}
        for name, (shape, kind) in loaded.items():
            if name.endswith("weight"):
                asked[name] = Nibbles((*shape[:-1], shape[-1] * 2))
            elif name.endswith("weight_scale"):
                asked[name] = Letters(shape, kind, _LETTERS, become)

        def beside() -> dict[str, torch.Tensor]:
            return {
                name: torch.ones(shape, dtype=kind, device=self._device)
                for name, (shape, kind) in loaded.items()
                if name not in asked
            }

        found = {}
        for name, by in find_codes(step, asked, beside, self._device).items():
            firsts, tiling = tiled(by, asked[name].bits)
            if firsts != tuple(range(0, prod(by.shape), prod(by.shape[-2:]))):
                raise NotRearranged(f"the matrices of {name} change places")
            found[name] = Order(asked[name].bits, tiling)
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
        module = processed(live, method, given, self._vllm_config, self._device)
        beside = [
            name
            for name, value in (*vars(module).items(), *module._buffers.items())
            if isinstance(value, torch.Tensor) and value is not vars(live).get(name, live._buffers.get(name))
        ]
        if unknown := set(beside) - {_WORKSPACE}:
            raise NotRearranged(f"vLLM makes {min(unknown)} beside its parameters")
        return held(module)


def _kernel(method: Any) -> str:
    """Which known kernel computes with a layer.

    Raises:
        NotRearranged: another one does.
    """
    if kind_of(method) == _EXPERTS:
        name = method.nvfp4_backend.name
        known = _EXPERT_BACKENDS.get(name)
        if known is not None and method.moe.moe_parallel_config.use_all2all_kernels:
            raise NotRearranged("its experts are made with communicators of their own")
    else:
        name = type(method.kernel).__name__
        known = _LINEAR_KERNELS.get(kind_of(method.kernel))
    if known is None:
        raise NotRearranged(f"what {name} makes of packed tensors is not known")
    return known


def _of_linear(loaded: Shapes, kernel: str, kind: str) -> Iterator[Derived]:
    weights = "weight_scale_2", (tuple(range(prod(loaded["weight_scale_2"][0]))),)
    inputs = "input_scale", (tuple(range(prod(loaded["input_scale"][0]))),)
    if kernel == _MARLIN:
        yield Derived("weight_global_scale", Formula.MARLIN, weights, scales="weight_scale")
    else:
        yield Derived("weight_global_scale", Formula.WEIGHT, weights)
    if kind == _W4A4_LINEAR:
        yield Derived("input_global_scale", Formula.INPUT, inputs=inputs)
        yield Derived("input_global_scale_inv", Formula.INVERSE_INPUT, inputs=inputs)
        yield Derived("alpha", Formula.PRODUCT, weights, inputs)


def _of_experts(loaded: Shapes) -> Iterator[Derived]:
    for stack in ("w13", "w2"):
        name = f"{stack}_weight_scale_2"
        experts, *parts = loaded[name][0]
        # Of w1 alone: vLLM only warns where that of w3 is another one.
        weights = name, tuple((expert * prod(parts),) for expert in range(experts))
        yield Derived(name, Formula.MARLIN, weights, scales=f"{stack}_weight_scale")


def _require_own_tensors(live: nn.Module) -> None:
    """Refuse experts whose kernel holds other tensors than the layer's parameters, as after a reload of vLLM's.

    Raises:
        NotRearranged: names one.
    """
    method = live.quant_method
    if kind_of(method) != _EXPERTS:
        return
    config = method.moe_quant_config
    held = {
        "w13_weight_scale_2": config.g1_alphas,
        "w2_weight_scale_2": config.g2_alphas,
        "w13_weight_scale": config.w1_scale,
        "w2_weight_scale": config.w2_scale,
    }
    for name, tensor in held.items():
        parameter = live._parameters.get(name)
        if tensor is None or parameter is None or tensor.data_ptr() != parameter.data_ptr():
            raise NotRearranged(f"its kernel computes with a copy of {name}")


def _noise(loaded: Shapes, largest: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Packed tensors of all codes, with block scales up to a byte, and positive global scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def filled(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.itemsize > 1:
            return (
                torch.rand(shape, dtype=torch.float32, device=device, generator=generator)
                .add_(0.01)
                .to(dtype)
            )
        most = largest + 1 if name.endswith("weight_scale") else 256
        return torch.randint(0, most, shape, dtype=torch.uint8, device=device, generator=generator).view(
            dtype
        )

    return {name: filled(name, *kind) for name, kind in loaded.items()}


def _strided(live: nn.Module) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return _strided_of({name: p for name, p in live._parameters.items() if p is not None})


def _strided_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
