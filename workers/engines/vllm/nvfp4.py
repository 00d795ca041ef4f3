"""Layers that vLLM's ModelOpt methods hold in NVFP4: what vLLM makes of them after loading.

This was read in vLLM 0.21, 0.26 and 0.32 (``quantization/modelopt.py``, ``kernels/linear/nvfp4``, ``fused_moe/oracle/nvfp4.py`` and
``utils/marlin_utils_fp4.py``). Of what a checkpoint has of a layer

- codes and block scales keep their bytes and places in the emulation. Marlin puts both in an order of its own, in as many bytes. It
  makes other bytes of the scales, too: their numbers times a power of two that depends on the largest one of the layer. From 0.26 on
  vLLM pads for it, after loading, what Marlin's tiles do not divide: zeros come behind the rows and columns of a linear layer, and in
  experts behind the rows of gate, behind those of up, and behind the columns of down;
- global scales become other parameters: the largest of the parts of a matrix, its inverse, products, and for Marlin that less the
  power of two.

So codes and scales land in the live parameters, and global scales beside the model. What :mod:`..common.packed.layers` says holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import log2, prod
from typing import Any

import torch
from torch import nn

from ....integration.layout.codes import Codes, Letters, Nibbles
from ....integration.layout.rearrangement import NotRearranged
from ....integration.quantize.nvfp4 import BLOCK
from ..common.packed.making import Derived, Formula, MarlinsMaps, Order, PackedForm, Padded, Shapes
from .compat import MARLIN_NVFP4, NVFP4_LINEAR, NVFP4_W4A16_LINEAR, has, kind_of, method_of
from .layouts import known_kernel

# By name: an engine without such layers imports none of these.
_MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
_EXPERTS = f"{_MODELOPT}.ModelOptNvFp4FusedMoE"
_KERNELS = "vllm.model_executor.kernels.linear.nvfp4"
_EMULATION, _MARLIN, _CUTLASS = "emulation", "marlin", "cutlass"
_MADE_OF = "packed tensors"
_LINEAR_KERNELS = {
    f"{_KERNELS}.emulation.EmulationNvFp4LinearKernel": _EMULATION,
    f"{_KERNELS}.marlin.MarlinNvFp4LinearKernel": _MARLIN,
    f"{_KERNELS}.cutlass.CutlassNvFp4LinearKernel": _CUTLASS,
    f"{_KERNELS}.flashinfer.FlashInferCutlassNvFp4LinearKernel": _CUTLASS,
    f"{_KERNELS}.flashinfer.FlashInferCudnnNvFp4LinearKernel": _CUTLASS,
    f"{_KERNELS}.flashinfer.FlashInferCuteDslNvFp4LinearKernel": _CUTLASS,
    f"{_KERNELS}.flashinfer.FlashInferB12xNvFp4LinearKernel": _CUTLASS,
}
# Not the emulation's: vLLM's loader writes the scale of an expert's inputs twice, from two tensors.
_EXPERT_BACKENDS = {"MARLIN": _MARLIN}
# E4M3's, behind which are negative numbers.
_NAN = 0x7F
# Of E4M3's numbers from 256 to 448: the largest there are, so that Marlin's factor is 1.
_LETTERS = tuple(range(0x78, 0x7F))
# Of its positive ones. A scale that is no number is one that vLLM 0.32 takes for not loaded.
_NUMBERS = tuple(range(1, _NAN))


class Nvfp4:
    """A :class:`~..common.packed.layers.PackedFormat`."""

    def kind(self, live: nn.Module) -> str:
        kind = method_of(getattr(live, "quant_method", None))
        return kind if kind in (NVFP4_LINEAR, NVFP4_W4A16_LINEAR, _EXPERTS) else ""

    def kernel(self, live: Any) -> str:
        method = live.quant_method
        if kind_of(method) == _EXPERTS:
            name = method.nvfp4_backend.name
            return known_kernel(_EXPERT_BACKENDS.get(name), name, _MADE_OF, live, experts=method.moe)
        kernel = method.kernel
        return known_kernel(_LINEAR_KERNELS.get(kind_of(kernel)), type(kernel).__name__, _MADE_OF, live)

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        asked: dict[str, Codes] = {}
        if kernel == _EMULATION:
            return asked, frozenset()
        if kernel == _CUTLASS:
            shape, dtype = loaded["weight_scale"]
            return {"weight_scale": Letters(shape, dtype, _NUMBERS, _NUMBERS)}, frozenset()
        if any(name.endswith("bias") for name in loaded):
            raise NotRearranged("it has a bias, which Marlin puts in another order, too")
        become = tuple(marlins_maps(live.params_dtype, device).maps[0][list(_LETTERS)].tolist())
        for name, (shape, kind) in loaded.items():
            if name.endswith("weight"):
                asked[name] = Nibbles((*shape[:-1], shape[-1] * 2))
            elif name.endswith("weight_scale"):
                asked[name] = Letters(shape, kind, _LETTERS, become)
        return asked, frozenset(name for name in asked if name.endswith("weight_scale"))

    def padding(
        self, live: Any, loaded: Shapes, kernel: str
    ) -> tuple[Mapping[str, Padded], Mapping[str, int]]:
        found: dict[str, Padded] = {}
        sizes: dict[str, int] = {}
        for name in ("weight", "weight_scale") if kernel == _CUTLASS else ():
            whole = tuple(getattr(live, name).shape)
            if whole != loaded[name][0]:
                found[name] = Padded(tuple((dim,) for dim in zip(loaded[name][0], whole, strict=False)))
        for name, (shape, _) in loaded.items() if kernel == _MARLIN else ():
            if not name.endswith("weight"):
                continue
            *stack, rows, columns = shape
            *_, down, across = getattr(live, name).shape
            # Marlin's codes are int32 [k / 16, 2 n], of a matrix [n, k].
            n, k = across // 2, down * 16
            if (n, k) == (rows, 2 * columns):
                continue
            parts = 2 if name.startswith("w13") and live.quant_method.moe.is_act_and_mul else 1
            outer = *(((one, one),) for one in stack), ((parts, parts), (rows // parts, n // parts))
            for packed, of_block in ((name, 2), (f"{name}_scale", BLOCK)):
                found[packed] = Padded((*outer, ((2 * columns // of_block, k // of_block),)))
            if not stack:
                sizes |= {"output_size_per_partition": n, "input_size_per_partition": k}
            elif name.startswith("w2"):
                sizes["intermediate_size_per_partition"] = k
        return found, sizes

    def form(self, live: Any, loaded: Shapes, kernel: str, orders: Mapping[str, Order]) -> PackedForm:
        staged = tuple(n for n in loaded if n.endswith(("weight_scale_2", "input_scale")))
        kind = self.kind(live)
        derived = tuple(_of_experts(loaded) if kind == _EXPERTS else _of_linear(loaded, kernel, kind))
        used = {name for one in derived for name, _ in (one.weights, one.inputs) if name}
        # vLLM 0.32 has BF16 for inputs' scales that it drops.
        if any(loaded[name][1] != torch.float32 for name in used):
            raise NotRearranged("its global scales are not FP32")
        changed = [order for order in orders.values() if order.changed]
        maps = marlins_maps(live.params_dtype, next(live.parameters()).device) if changed else None
        return PackedForm(loaded, staged, orders, derived, live.params_dtype, maps=maps)

    def given(self, loaded: Shapes, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        for seed, largest in enumerate((0x7E, 0x2F, 0x01)):
            yield _noise(loaded, largest, seed, device)

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        method = live.quant_method
        if kind_of(method) != _EXPERTS:
            return {}
        config = method.moe_quant_config
        return {
            "w13_weight_scale_2": config.g1_alphas,
            "w2_weight_scale_2": config.g2_alphas,
            "w13_weight_scale": config.w1_scale,
            "w2_weight_scale": config.w2_scale,
        }


@lru_cache(maxsize=8)
def marlins_maps(dtype: torch.dtype, device: torch.device) -> MarlinsMaps:
    """By vLLM's own functions, of layers that compute in ``dtype``.

    Raises:
        NotRearranged: they are others than those that were read.
    """
    if not has(MARLIN_NVFP4):
        raise NotRearranged("this vLLM makes Marlin's scales by other functions")
    try:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
            _nvfp4_compute_scale_factor,
            nvfp4_marlin_process_global_scale,
            nvfp4_marlin_process_scales,
        )

        numbers = torch.arange(_NAN, device=device).to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        factors = [_nvfp4_compute_scale_factor(number.reshape(1, 1).half(), dtype) for number in numbers]
        powers = [int(log2(factor)) for factor in factors]
        # Apart, or vLLM would warn of scales that are no numbers.
        nan = (torch.full((1,), torch.nan, dtype=dtype, device=device).half() * 2**7).view(torch.int16)
        nan = (nan << 1).view(torch.uint8)[1]
        maps = torch.zeros(max(powers) + 1, 256, dtype=torch.uint8, device=device)
        for power, row in enumerate(maps):
            made, _ = nvfp4_marlin_process_scales(numbers[:, None].repeat(1, 4), 2.0**power, dtype)
            row[:_NAN] = made.view(torch.uint8)[:, 0]
            row[[_NAN, 0xFF]] = nan
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotRearranged(
            f"vLLM's arithmetic of Marlin's scales failed: {type(error).__name__}: {error}"
        ) from error
    known = torch.zeros(256, dtype=torch.int32, device=device)
    known[:_NAN] = torch.tensor(powers, dtype=torch.int32, device=device)
    factors = torch.tensor([2.0**power for power in range(len(maps))], dtype=torch.float32, device=device)
    return MarlinsMaps(maps, known, factors, nvfp4_marlin_process_global_scale)


def _of_linear(loaded: Shapes, kernel: str, kind: str) -> Iterator[Derived]:
    weights = "weight_scale_2", (tuple(range(prod(loaded["weight_scale_2"][0]))),)
    inputs = "input_scale", (tuple(range(prod(loaded["input_scale"][0]))),)
    if kernel == _MARLIN:
        yield Derived("weight_global_scale", Formula.MARLIN, weights, scales="weight_scale")
    else:
        yield Derived("weight_global_scale", Formula.WEIGHT, weights)
    if kind == NVFP4_LINEAR:
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
