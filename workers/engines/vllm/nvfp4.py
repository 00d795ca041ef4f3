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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from math import log2, prod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from ....integration.layout.codes import Codes, Letters, Nibbles, Tiling, find_codes, tiled
from ....integration.layout.rearrangement import NotRearranged
from ....integration.packing.reordering import Unordered, make_largest_bytes, make_reordering
from .compat import kind_of
from .kernel_layouts import apart
from .layouts import has_padding

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
_NAN = 0x7F
# What Marlin makes of NaN in FP16: its sign is cut off, as every number's.
_MARLINS_NAN = 0xFC
_BY_MARLIN = "the engine puts it in Marlin's order once it has landed, so what a sparse refit builds on is not there any more"

_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_Tensors = Mapping[str, torch.Tensor]


class _Formula(Enum):
    """How a global scale of a kernel is made, of the largest weight's and input's scale of some that were loaded."""

    WEIGHT = auto()
    MARLIN = auto()
    INPUT = auto()
    INVERSE_INPUT = auto()
    PRODUCT = auto()


@dataclass(frozen=True)
class _Derived:
    """A live parameter of global scales.

    Attributes:
        parameter: its name.
        formula: of each element.
        weights: for each element the weights' scales of which it has the largest: the loaded parameter, and places in it.
        inputs: the same of inputs' scales.
        scales: the block scales whose factor is taken off.
    """

    parameter: str
    formula: _Formula
    weights: tuple[str, tuple[tuple[int, ...], ...]] = ("", ())
    inputs: tuple[str, tuple[tuple[int, ...], ...]] = ("", ())
    scales: str = ""

    @property
    def elements(self) -> int:
        return max(len(self.weights[1]), len(self.inputs[1]))


@dataclass(frozen=True)
class _Order:
    """In which a packed parameter lies.

    Attributes:
        bits: of an element.
        tiling: of each of its matrices, one behind the other.
    """

    bits: int
    tiling: Tiling


@dataclass(frozen=True)
class PackedForm:
    """How layers of one kind are made of what is loaded.

    Attributes:
        loaded: shape and dtype of all parameters as they are loaded.
        staged: those of them that land beside the model.
        orders: those that are put in order in the live memory.
        derived: what is made of :attr:`staged`.
        dtype: in which the layer computes.
        held: shape, strides and dtype of the parameters that vLLM makes.
    """

    loaded: _Shapes
    staged: tuple[str, ...]
    orders: Mapping[str, _Order]
    derived: tuple[_Derived, ...]
    dtype: torch.dtype
    held: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def lands_elsewhere(self, parameter: str) -> bool:
        """Whether a parameter is not loaded into a live one as that is."""
        return parameter in self.staged or parameter in self.orders


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

    def _found_out(self, live: nn.Module, loaded: _Shapes, kernel: str) -> PackedForm:
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
        self, step: Callable[[dict[str, torch.Tensor]], _Tensors], loaded: _Shapes, dtype: torch.dtype
    ) -> dict[str, _Order]:
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
            found[name] = _Order(asked[name].bits, tiling)
        return found

    def _prove(self, form: PackedForm, given: _Tensors, theirs: _Tensors) -> None:
        """What is made by ``form`` is what vLLM has made."""
        held = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
        for tensor in held.values():
            tensor.view(-1).view(torch.uint8).fill_(_NAN)
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

    def _processed(self, live: nn.Module, given: _Tensors) -> dict[str, torch.Tensor]:
        """What vLLM makes of ``given`` in the place of the live parameters."""
        module, method = apart(live), live.quant_method
        method = apart(method) if isinstance(method, nn.Module) else copy.copy(method)
        module._parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in given.items()
        }
        module.quant_method = method
        try:
            with set_current_vllm_config(self._vllm_config), self._device, torch.no_grad():
                method.process_weights_after_loading(module)
        except Exception as error:
            # Too little memory for other weights, or a state that they do not find.
            raise NotRearranged(
                f"vLLM's processing of other weights failed: {type(error).__name__}: {error}"
            ) from error
        beside = [
            name
            for name, value in (*vars(module).items(), *module._buffers.items())
            if isinstance(value, torch.Tensor) and value is not vars(live).get(name, live._buffers.get(name))
        ]
        if unknown := set(beside) - {_WORKSPACE}:
            raise NotRearranged(f"vLLM makes {min(unknown)} beside its parameters")
        return {name: p.data for name, p in module._parameters.items() if p is not None}


class Making:
    """What refits make of packed layers once all has landed; prepared for parameters that stay where they are.

    Args:
        modules: by name, the live parameters of each, and its form.
        device: of them.
    """

    def __init__(self, modules: Mapping[str, tuple[_Tensors, PackedForm]], device: torch.device) -> None:
        self._device = device
        self._modules = dict(modules)
        self._slots: dict[tuple[str, str], int] = {}
        self._staged: dict[tuple[str, str], slice] = {}
        count = 0
        for module, (_, form) in modules.items():
            for name in form.staged:
                begin, count = count, count + prod(form.loaded[name][0])
                self._staged[module, name] = slice(begin, count)
        self._flat = torch.zeros(count, dtype=torch.float32, device=device)
        self._orders = self._ordered()
        self._scales = self._derived()

    def landing(self, module: str, parameter: str) -> torch.Tensor | None:
        """Where a parameter of a module lands, as it is loaded; None if in the live parameter as that is."""
        if module not in self._modules:
            return None
        held, form = self._modules[module]
        if (module, parameter) in self._staged:
            return self._flat[self._staged[module, parameter]].view(form.loaded[parameter][0])
        if parameter not in form.orders:
            return None
        shape, dtype = form.loaded[parameter]
        return _flat_bytes(held[parameter]).view(dtype).view(shape)

    def rewrites(self, module: str, parameter: str) -> str:
        """Why what has landed of a parameter does not stay as it is; empty if it does."""
        return _BY_MARLIN if module in self._modules and parameter in self._modules[module][1].orders else ""

    @torch.no_grad()
    def make(self) -> None:
        """Once per refit, after all has landed; on a GPU, enqueued on the current stream."""
        if self._orders is not None:
            self._orders.put()
        for make in self._scales:
            make()
        torch._foreach_copy_(self._targets, self._sources)

    def _ordered(self) -> _Orders | None:
        """Prepare what puts all matrices in order; notes the slot of each module's block scales."""
        jobs: list[Unordered] = []
        scales: list[tuple[torch.Tensor, int]] = []
        dtypes = {form.dtype for _, form in self._modules.values() if form.orders}
        if len(dtypes) > 1:
            raise ValueError(f"layers compute in {dtypes}")
        for module, (held, form) in self._modules.items():
            for name, order in form.orders.items():
                memory = _flat_bytes(held[name])
                slot = None
                if order.bits == 8:
                    slot = self._slots[module, name] = len(self._slots)
                    scales.append((memory, slot))
                *_, rows, width = form.loaded[name][0]
                jobs += [
                    Unordered(matrix, rows, width * 8 // order.bits, order.bits, order.tiling, slot)
                    for matrix in memory.split(rows * width)
                ]
        return _Orders(jobs, scales, len(self._slots), dtypes.pop(), self._device) if jobs else None

    def _derived(self) -> list[Callable[[], None]]:
        """Prepare what computes all global scales: a function for each formula, which writes its part of one row."""
        by_formula: dict[tuple[_Formula, torch.dtype], list[tuple[str, _Derived]]] = defaultdict(list)
        for module, (_, form) in self._modules.items():
            for one in form.derived:
                by_formula[one.formula, form.dtype].append((module, one))
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        makers: list[Callable[[], None]] = []
        for (formula, dtype), found in by_formula.items():
            row = torch.empty(sum(one.elements for _, one in found), dtype=torch.float32, device=self._device)
            sizes = [one.elements for _, one in found]
            for (module, one), part in zip(found, row.split(sizes), strict=True):
                target = self._modules[module][0][one.parameter]
                if target.numel() != one.elements:
                    raise ValueError(f"{one.parameter} has {target.numel()} elements")
                self._targets.append(target)
                self._sources.append(part.view(target.shape))
            weights = self._groups((module, one.weights) for module, one in found)
            inputs = self._groups((module, one.inputs) for module, one in found)
            slots = torch.tensor(
                [
                    self._slots[module, one.scales]
                    for module, one in found
                    if one.scales
                    for _ in range(one.elements)
                ],
                dtype=torch.int64,
                device=self._device,
            )
            makers.append(partial(self._write, formula, dtype, row, weights, inputs, slots))
        return makers

    def _groups(self, found: Iterator[tuple[str, tuple[str, tuple[tuple[int, ...], ...]]]]) -> torch.Tensor:
        """Places in what has landed beside the model, ``[elements, most]``; the last one of a group again where it has fewer."""
        rows = [
            [self._staged[module, name].start + place for place in places]
            for module, (name, groups) in found
            for places in groups
        ]
        most = max(map(len, rows), default=0)
        return torch.tensor(
            [row + row[-1:] * (most - len(row)) for row in rows], dtype=torch.int64, device=self._device
        )

    def _write(
        self,
        formula: _Formula,
        dtype: torch.dtype,
        row: torch.Tensor,
        weights: torch.Tensor,
        inputs: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """The operations of vLLM's ``process_weights_after_loading`` in their order, on all layers' scales."""
        if formula is _Formula.WEIGHT:
            made = self._largest(weights)
        elif formula is _Formula.MARLIN:
            assert self._orders is not None
            made = self._orders.global_scales(self._largest(weights), slots, dtype)
        elif formula is _Formula.INPUT:
            made = self._largest(inputs)
        elif formula is _Formula.INVERSE_INPUT:
            made = 1.0 / self._largest(inputs)
        else:
            made = self._largest(inputs) * self._largest(weights)
        row.copy_(made)

    def _largest(self, groups: torch.Tensor) -> torch.Tensor:
        return self._flat[groups].amax(dim=1)


@dataclass(frozen=True)
class MarlinsMaps:
    """What Marlin makes of block scales.

    Attributes:
        maps: uint8 ``[powers, 256]``: of each byte, for each power of two by which scales are multiplied.
        powers: int32 ``[256]``: the power for each byte that is the largest of a layer; 0 for no positive one.
    """

    maps: torch.Tensor
    powers: torch.Tensor


def marlins_maps(dtype: torch.dtype, device: torch.device) -> MarlinsMaps:
    """By vLLM's own functions, of layers that compute in ``dtype``.

    Raises:
        NotRearranged: they are others than those that were read.
    """
    try:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
            _nvfp4_compute_scale_factor,
            nvfp4_marlin_process_scales,
        )

        numbers = torch.arange(_NAN, device=device).to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        factors = [_nvfp4_compute_scale_factor(number.reshape(1, 1).half(), dtype) for number in numbers]
        powers = [int(log2(factor)) for factor in factors]
        maps = torch.zeros(max(powers) + 1, 256, dtype=torch.uint8, device=device)
        for power, row in enumerate(maps):
            made, _ = nvfp4_marlin_process_scales(numbers[:, None].repeat(1, 4), 2.0**power, dtype)
            row[:_NAN] = made.view(torch.uint8)[:, 0]
            row[[_NAN, 0xFF]] = _MARLINS_NAN
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise NotRearranged(
            f"vLLM's arithmetic of Marlin's scales failed: {type(error).__name__}: {error}"
        ) from error
    known = torch.zeros(256, dtype=torch.int32, device=device)
    known[:_NAN] = torch.tensor(powers, dtype=torch.int32, device=device)
    return MarlinsMaps(maps, known)


class _Orders:
    """Puts codes and block scales in Marlin's order."""

    def __init__(
        self,
        jobs: Sequence[Unordered],
        scales: Sequence[tuple[torch.Tensor, int]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._maps = marlins_maps(dtype, device)
        self._reordering = make_reordering(jobs, device)
        self._finder = make_largest_bytes(scales, device)
        self._found = torch.zeros(slots, dtype=torch.int32, device=device)
        self._choices = torch.zeros(slots, dtype=torch.int32, device=device)

    def put(self) -> None:
        self._finder.find(self._found)
        torch.index_select(self._maps.powers, 0, self._found, out=self._choices)
        self._reordering.launch(self._maps.maps, self._choices)

    def global_scales(self, largest: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
            nvfp4_marlin_process_global_scale,
        )

        # Of a number that Marlin could not tell from others, these are exact.
        factors = torch.exp2(self._choices[slots].float())
        return nvfp4_marlin_process_global_scale(largest, dtype) / factors


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


def _of_linear(loaded: _Shapes, kernel: str, kind: str) -> Iterator[_Derived]:
    weights = "weight_scale_2", (tuple(range(prod(loaded["weight_scale_2"][0]))),)
    inputs = "input_scale", (tuple(range(prod(loaded["input_scale"][0]))),)
    if kernel == _MARLIN:
        yield _Derived("weight_global_scale", _Formula.MARLIN, weights, scales="weight_scale")
    else:
        yield _Derived("weight_global_scale", _Formula.WEIGHT, weights)
    if kind == _W4A4_LINEAR:
        yield _Derived("input_global_scale", _Formula.INPUT, inputs=inputs)
        yield _Derived("input_global_scale_inv", _Formula.INVERSE_INPUT, inputs=inputs)
        yield _Derived("alpha", _Formula.PRODUCT, weights, inputs)


def _of_experts(loaded: _Shapes) -> Iterator[_Derived]:
    for stack in ("w13", "w2"):
        name = f"{stack}_weight_scale_2"
        experts, *parts = loaded[name][0]
        # Of w1 alone: vLLM only warns where that of w3 is another one.
        weights = name, tuple((expert * prod(parts),) for expert in range(experts))
        yield _Derived(name, _Formula.MARLIN, weights, scales=f"{stack}_weight_scale")


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


def _noise(loaded: _Shapes, largest: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
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


def _strided_of(tensors: _Tensors) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
