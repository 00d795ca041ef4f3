"""Layers of a vLLM model that compressed-tensors' methods hold in INT4 (W4A16): their format, and what vLLM makes of them.

This was read in vLLM 0.21, 0.26 and 0.32 (``compressed_tensors_wNa16.py``, ``compressed_tensors_moe_wna16*.py``,
``kernels/linear/mixed_precision`` and ``utils/marlin_utils.py``). A checkpoint has codes ``weight_packed`` (int32 ``[n, k / 8]``), scales
``weight_scale`` (``[n, k / group]`` in the model's dtype) and the constant ``weight_shape``, with which nothing computes. Experts are
loaded transposed (``[E, k / 8, 2 n]``), but by 0.32. Of these

- Marlin has codes and scales in an order of its own, in as many bytes;
- the CPU's kernel has codes of 16 rows beside each other, and scales transposed; which of its products computes by that, AMX's or
  another one, does not change the order;
- Triton's experts are transposed back.

So all keep their bytes, of which codes and 16-bit scales go elsewhere. What :mod:`.packed_layers` says holds for these layers. Kernels
that pad (Marlin from 0.26 on), that change codes (the CPU's of 8-bit inputs from 0.26 on) or that were not read take vLLM's reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....integration.errors import PlanError, RefitError
from ....integration.layout.codes import Bytes, Codes, Nibbles
from ....integration.layout.rearrangement import NotRearranged
from ....integration.quantize import int4
from ....integration.quantize.formats import Int4
from ....integration.weights.manifest import dtype_name
from ....integration.weights.routing import SAY_REFIT_DTYPE
from ..common.loader_trace.trace import LoaderTrace, Manifest
from .compat import WNA16_EXPERTS, WNA16_LINEAR, WNA16_MARLIN_EXPERTS, kind_of
from .layouts import known_kernel
from .packed_making import PutInOrder, Shapes

_KERNELS = "vllm.model_executor.kernels.linear.mixed_precision"
_MARLIN, _CPU, _TRITON = "marlin", "cpu", "triton"
_MADE_OF = "INT4 codes and scales"
_LINEAR_KERNELS = {
    f"{_KERNELS}.marlin.MarlinLinearKernel": _MARLIN,
    f"{_KERNELS}.cpu.CPUWNA16LinearKernel": _CPU,
}
# vLLM's own choice on Hopper for groups of 64 and 128.
_MACHETE = f"{_KERNELS}.machete.MacheteLinearKernel"
_EXPERT_BACKENDS = {"MARLIN": _MARLIN, "TRITON": _TRITON}
_SCALES = {"weight_packed": "weight_scale"}
_EXPERTS = (WNA16_EXPERTS, WNA16_MARLIN_EXPERTS)
_SCALES_OF_EXPERTS = {"w13_weight_packed": "w13_weight_scale", "w2_weight_packed": "w2_weight_scale"}


@dataclass(frozen=True)
class Int4Weights:
    """How one module holds its weights.

    Attributes:
        scales: name of a parameter of codes → name of the parameter of its scales.
        format: in which the trainer has to send them.
    """

    scales: Mapping[str, str]
    format: Int4


def int4_modules(model: nn.Module) -> dict[str, Int4Weights]:
    """The modules of ``model`` that hold weights in INT4 as a trainer makes it, by name."""
    found = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind and (format := _format_of(module, kind)) is not None:
            found[name] = Int4Weights(_SCALES if kind == WNA16_LINEAR else _SCALES_OF_EXPERTS, format)
    return found


def check_groups(model: nn.Module, modules: Mapping[str, Int4Weights]) -> None:
    """Refuse experts whose shards cut groups: vLLM 0.21 loads them without an error, with scales of other columns than their own.

    Args:
        model: the live one.
        modules: of it, as :func:`int4_modules` finds them.

    Raises:
        RefitError: names the first such module.
    """
    for name, facts in modules.items():
        module = model.get_submodule(name)
        if _kind_of(module) not in _EXPERTS:
            continue
        config: Any = module.quant_method.moe  # type: ignore[union-attr]
        for what, columns in (
            ("intermediate size", config.intermediate_size_per_partition),
            ("hidden size", config.hidden_dim),
        ):
            if columns % facts.format.group:
                raise RefitError(
                    f"a rank has {columns} of the {what} of {name}, which cuts groups of {facts.format.group} that share an INT4 scale: vLLM "
                    "computes with scales of other groups, whatever is loaded. Start vLLM with enable_expert_parallel, another "
                    "tensor_parallel_size, or from smaller groups",
                    stage="trace",
                )


class Int4Layers(PutInOrder):
    """A :class:`.packed_layers.PackedFormat`, of the layers of :func:`int4_modules`."""

    def kind(self, live: nn.Module) -> str:
        kind = _kind_of(live)
        return kind if kind and _format_of(live, kind) is not None else ""

    def kernel(self, live: Any) -> str:
        if _kind_of(live) != WNA16_LINEAR:
            name, experts = _backend(live.quant_method), live.quant_method.moe
            if experts.has_bias:
                raise NotRearranged("its kernel computes with biases of experts, which have not been read")
            return known_kernel(_EXPERT_BACKENDS.get(name), name, _MADE_OF, live, experts=experts)
        kernel = live.scheme.kernel
        if kind_of(kernel) == _MACHETE:
            raise NotRearranged(
                "what Machete makes of INT4 codes and scales is not known (start vLLM with "
                "VLLM_DISABLED_KERNELS=MacheteLinearKernel, by which it takes Marlin, or from groups of 32)"
            )
        known = known_kernel(_LINEAR_KERNELS.get(kind_of(kernel)), type(kernel).__name__, _MADE_OF, live)
        if kernel.config.act_type.itemsize == 1:
            raise NotRearranged("it computes with inputs of 8 bits, for which vLLM changes codes and scales")
        return known

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        asked: dict[str, Codes] = {}
        for name, (shape, kind) in loaded.items():
            if name.endswith("weight_packed"):
                asked[name] = Nibbles((*shape[:-1], shape[-1] * int4.PER_ITEM), dtype=kind)
            # Marlin's bias has another order, too.
            elif name.endswith("weight_scale") or (kernel == _MARLIN and name == "bias"):
                asked[name] = Bytes((*shape[:-1], shape[-1] * kind.itemsize), kind)
        return asked, frozenset()

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        # vLLM 0.21 has no kernel beside the layer, whose parameters the method hands over each time.
        if _kind_of(live) == WNA16_LINEAR or getattr(live.quant_method, "moe_kernel", None) is None:
            return {}
        config = live.quant_method.moe_quant_config
        return {"w13_weight_scale": config.w1_scale, "w2_weight_scale": config.w2_scale}


@contextmanager
def accepting_unquantized(twin: nn.Module, modules: Mapping[str, Int4Weights]) -> Iterator[dict[str, str]]:
    """Give modules of a twin parameters for weights that are not quantized, beside those for codes, in the same order.

    vLLM's loader finds parameters by their names, and knows none for such a weight where it holds codes.

    Args:
        twin: without storage.
        modules: of it, by name.

    Yields:
        Names of these parameters → names of those for codes.
    """
    made: dict[str, str] = {}
    for name, facts in modules.items():
        module = twin.get_submodule(name)
        for codes in facts.scales:
            plain = codes.removesuffix(Int4.code_name_end)
            module.register_parameter(plain, _unpacked(module, codes, facts.format))
            made[f"{name}.{plain}"] = f"{name}.{codes}"
    try:
        yield made
    finally:
        for parameter in made:
            path, _, plain = parameter.rpartition(".")
            del twin.get_submodule(path)._parameters[plain]


def require_packed(trace: LoaderTrace, manifest: Manifest, taken: Mapping[str, str]) -> None:
    """Refuse weights that are not quantized where the engine holds codes.

    Args:
        trace: of ``manifest``, by a twin that was :func:`accepting_unquantized`.
        manifest: checkpoint name, full shape and dtype of every tensor.
        taken: names of its parameters for them, and of those for codes.

    Raises:
        PlanError: names the first weight.
    """
    wrong = [
        (name, taken[parameter], shape, dtype)
        for name, shape, dtype in manifest
        for parameter in sorted(trace.touched[name] & taken.keys())
    ]
    if wrong:
        name, codes, shape, dtype = wrong[0]
        if dtype is torch.float32:
            remedy = f"INT4 is not made of float32. {SAY_REFIT_DTYPE}"
        elif len(shape) != 2:
            remedy = f"A trainer makes INT4 of matrices alone, and this one has the shape {list(shape)}"
        else:
            remedy = (
                "Set policy.refit.trainer_quantize_int4=true; if it is, export in the dtype in which the engine computes, of which alone the "
                "trainer makes its codes"
            )
        raise PlanError(
            f"the trainer sends {dtype_name(dtype)} and the engine holds INT4 in {codes} ({len(wrong)} such weights). Nothing was "
            f"written. {remedy}, or start the engine without quantization",
            stage="trace",
            parameter=name,
        )


def _unpacked(module: nn.Module, codes: str, format: Int4) -> nn.Parameter:
    """A parameter like the one of packed codes, with an element for each code."""
    packed: Any = module.get_parameter(codes)
    shape = list(packed.shape)
    shape[-2 if getattr(packed, "is_transposed", False) else -1] *= int4.PER_ITEM
    memory = torch.empty(shape, dtype=format.scale_dtype, device=packed.device)
    if len(shape) == 3:
        plain = nn.Parameter(memory, requires_grad=False)
        vars(plain).update(vars(packed))
        return plain
    from vllm.model_executor.parameter import ModelWeightParameter

    made: nn.Parameter = ModelWeightParameter(
        data=memory, input_dim=1, output_dim=0, weight_loader=packed.weight_loader
    )
    return made


def _kind_of(module: nn.Module) -> str:
    """The method, or the scheme, by which a module holds integers packed by compressed-tensors; empty if it does not."""
    kinds = kind_of(getattr(module, "quant_method", None)), kind_of(getattr(module, "scheme", None))
    return next((k for k in kinds if k in (WNA16_LINEAR, *_EXPERTS)), "")


def _format_of(module: Any, kind: str) -> Int4 | None:
    """None of other integers than a trainer makes."""
    if kind == WNA16_LINEAR:
        how = module.scheme
        plain = how.pack_factor == int4.PER_ITEM and how.symmetric and not getattr(how, "has_g_idx", False)
    else:
        how = module.quant_method
        plain = how.num_bits == 4 and how.weight_quant.symmetric and how.weight_quant.actorder is None
    # A head of vLLM 0.21 does not tell it.
    kept = getattr(module, "params_dtype", None)
    dtype = "" if kept is None else dtype_name(kept)
    fits = plain and how.group_size in int4.GROUPS and dtype in ("bfloat16", "float16")
    return Int4(how.group_size, dtype) if fits else None


def _backend(method: Any) -> str:
    """What computes with experts, as vLLM calls it from 0.26 on."""
    chosen = getattr(method, "wna16_backend", None)
    if chosen is not None:
        name: str = chosen.name
        return name
    return str(getattr(method, "kernel_backend", _TRITON)).upper()
