"""Does a manifest reach all of an engine's weights? What it leaves would keep an older version, or random numbers.

Some parameters of packed layers (NVFP4, INT4, INT8) need not come, because nothing computes with them. Their layers are reloaded,
which starts from undefined memory: what no tensor brings is computed with all the same, if it is used. Which ones are unused was
read in vLLM 0.21, for each method by its exact type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn

from ..common.loader_trace.trace import LoaderTrace, Part
from ..common.loader_trace.unreached import filled_buffers, require_reached
from .compat import NVFP4_W4A16_LINEAR, WNA16_EXPERTS, WNA16_LINEAR, WNA16_MARLIN_EXPERTS, kind_of, method_of
from .layouts import ATTENTION_MODULES, has_padding

# By name: an engine without such layers imports none of these, and later vLLMs lack some.
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_NVFP4_EXPERTS = f"{_QUANTIZATION}.modelopt.ModelOptNvFp4FusedMoE"
_GPTQ_EXPERTS = f"{_QUANTIZATION}.gptq_marlin.GPTQMarlinMoEMethod"
_GPTQ_LINEAR = (
    f"{_QUANTIZATION}.gptq.GPTQLinearMethod",
    f"{_QUANTIZATION}.gptq_marlin.GPTQMarlinLinearMethod",
)
_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")
# Post-load processing sorts the groups of an activation order itself, so that no checkpoint has these.
_SORTED = ("w13_g_idx_sort_indices", "w2_g_idx_sort_indices")
_CT_GROUPS = ("w13_weight_g_idx", "w2_weight_g_idx")
# Constants, which no refit brings.
_CT_SHAPES = ("w13_weight_shape", "w2_weight_shape")
_GPTQ_GROUPS = ("w13_g_idx", "w2_g_idx")
# In one expert: the first element, and by stride how many there are.
_Place = tuple[int, frozenset[tuple[int, int]]]


def check_complete(
    trace: LoaderTrace,
    owners: Mapping[str, frozenset[str]],
    model: nn.Module,
    parameters: Set[str],
    *,
    unused: frozenset[str] = frozenset(),
    dummy: bool = False,
) -> None:
    """Raise where the manifest leaves a part of a parameter with the weights of an earlier version.

    Modules that are reloaded are no exception: what doesn't come is undefined memory in them.

    Args:
        trace: of the whole manifest.
        owners: for each parameter or buffer the modules that hold it.
        model: the live model.
        parameters: names of its parameters as they are loaded.
        unused: those that nothing computes with.
        dummy: the engine was started with ``load_format=dummy``, so that what no tensor reaches holds random numbers:
            floating-point buffers of the ``state_dict`` count too (vLLM fills them as it does parameters).

    Raises:
        PlanError: names the first parameter.
    """
    filled = filled_buffers(model, besides=ATTENTION_MODULES) & owners.keys() if dummy else set()
    touched = frozenset().union(*trace.touched.values())
    has_to_come = (
        name
        for name in (parameters | filled) - unused
        if not any(
            _may_lack(model.get_submodule(module), name, trace.parts.get(name) if name in touched else None)
            for module in owners[name]
        )
    )
    require_reached(trace, has_to_come, filled if dummy else None)


def _may_lack(live: Any, parameter: str, part: Part | None) -> bool:
    """Whether vLLM itself leaves elements of a parameter unloaded: padding, if tensors bring the others, of which ``part`` is what
    they bring, and scales of attention that it sets to 1."""
    if isinstance(live, ATTENTION_MODULES):
        return True
    if part is None or not has_padding(live):
        return False
    gate_and_up = parameter.rpartition(".")[2].startswith("w13") and live.moe_config.is_act_and_mul
    return _lacks_padding_alone(part, gate_and_up)


def _lacks_padding_alone(part: Part, gate_and_up: bool) -> bool:
    """Whether what does not come of experts can be padding: it is the same of all experts, and of gate and up.

    Sizes don't tell it: where ranks share columns, the last ones may have fewer of them than others.
    """
    count, *shape = part.shape
    step, *stride = part.stride
    by_expert: list[set[_Place]] = [set() for _ in range(count)]
    for region in part.regions:
        first, offset = divmod(region.offset, step)
        extents = {s: n for n, s in zip(region.shape, region.stride, strict=True) if n > 1}
        experts = extents.pop(step, 1)
        for places in by_expert[first : first + experts]:
            places.add((offset, frozenset(extents.items())))
    if any(places != by_expert[0] for places in by_expert):
        return False
    # A tensor of all experts has gate and up in it.
    return not gate_and_up or part.dims >= len(part.shape) or _halves_alike(by_expert[0], shape, stride)


def _halves_alike(places: set[_Place], shape: list[int], stride: list[int]) -> bool:
    """Whether the same comes of both halves of an expert, along the first dimension over whose middle nothing reaches."""
    for n, step in zip(shape, stride, strict=True):
        half = n // 2
        halves: tuple[set[_Place], set[_Place]] = set(), set()
        across = n % 2 > 0
        for offset, extents in places:
            row = offset // step % n
            across |= row < half < row + dict(extents).get(step, 1)
            upper = row >= half
            halves[upper].add((offset - upper * half * step, extents))
        if not across:
            return halves[0] == halves[1]
    return True


def unused_parameters(model: nn.Module) -> frozenset[str]:
    """Names of those that nothing computes with, as they are before vLLM processes them."""
    return frozenset(parameter for _, unused in _layers(model) for parameter in unused)


def absent_elements(model: nn.Module, trace: LoaderTrace) -> dict[str, int]:
    """By layer, how many elements are not used and no tensor of the traced manifest brings."""
    if trace.unknown:
        return {}
    touched = frozenset().union(*trace.touched.values())
    counted = {
        name: sum(trace.unwritten.get(parameter, 0) for parameter in unused if parameter not in touched)
        for name, unused in _layers(model)
    }
    return {name: count for name, count in counted.items() if count}


def _layers(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Name of each layer that has parameters which nothing computes with, and these."""
    for name, module in model.named_modules():
        unused = unused_of(module)
        if unused:
            yield name, [f"{name}.{parameter}" for parameter in unused]


def unused_of(module: nn.Module) -> tuple[str, ...]:
    """Those of a module's own parameters that nothing computes with, as they are before vLLM processes them."""
    if kind_of(getattr(module, "scheme", None)) == WNA16_LINEAR:
        return ("weight_shape",)
    method: Any = getattr(module, "quant_method", None)
    kind = method_of(method)
    # One method has experts of W4A4 and W4A16; all its backends but Marlin quantize inputs.
    if kind == _NVFP4_EXPERTS:
        return _INPUT_SCALES if method.nvfp4_backend.name == "MARLIN" else ()
    if kind == NVFP4_W4A16_LINEAR:
        return ("input_scale",)
    # Registered whether or not the checkpoint has an activation order; without one, kernels get empty tensors or none.
    if kind == WNA16_EXPERTS:
        return _CT_GROUPS + _SORTED + _CT_SHAPES
    if kind == WNA16_MARLIN_EXPERTS:
        return (_SORTED if method.actorder == "group" else _CT_GROUPS + _SORTED) + _CT_SHAPES
    if kind == _GPTQ_EXPERTS:
        return _SORTED if method.quant_config.desc_act else _GPTQ_GROUPS + _SORTED
    if kind in _GPTQ_LINEAR:
        return () if method.quant_config.desc_act else ("g_idx",)
    return ()
