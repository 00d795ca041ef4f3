"""NVFP4 in checkpoints: ModelOpt's names, which weights share a global scale, and the configuration that engines read.

A weight ``x.weight`` ``[n, k]`` becomes ``x.weight`` (``uint8`` ``[n, k / 2]``), ``x.weight_scale`` (``float8_e4m3fn``
``[n, k / 16]``), ``x.weight_scale_2`` (FP32 scalar) and, if activations are quantized too, ``x.input_scale`` (FP32
scalar, ``amax / (6 · 448)`` of the layer's inputs). vLLM and TensorRT-LLM read these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from . import nvfp4

# What engines join in one matrix, by the last part of the module's name. vLLM takes the largest weight_scale_2 and
# input_scale of its parts for all (process_weights_after_loading of ModelOptNvFp4LinearMethod), and for experts the
# first part's (ModelOptNvFp4FusedMoE); TensorRT-LLM does alike. Only equal ones mean what they were made with.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
_EXPERT = re.compile(r"\bexperts\.\d+\b")


@dataclass(frozen=True)
class PackedNames:
    """What stands for one weight in a checkpoint."""

    weight: str
    weight_scale: str
    weight_scale_2: str
    input_scale: str


def packed_names(weight: str) -> PackedNames:
    """The names that stand for the weight of this name.

    Raises:
        ValueError: it does not end in ``.weight``.
    """
    module = module_of(weight)
    return PackedNames(weight, f"{module}.weight_scale", f"{module}.weight_scale_2", f"{module}.input_scale")


def module_of(weight: str) -> str:
    """The module that a weight belongs to.

    Raises:
        ValueError: the name does not end in ``.weight``.
    """
    if not weight.endswith(".weight"):
        raise ValueError(
            f"{weight} is no weight of a linear layer by its name, which has to end in .weight; engines would not "
            "find its scales. Leave it in BF16"
        )
    return weight.removesuffix(".weight")


def packed_tensors(
    name: str, weight: torch.Tensor, scale_2: torch.Tensor, input_scale: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A whole weight as a checkpoint has it: codes, block scales, global scale, and the scale of the inputs.

    Args:
        name: of the weight.
        weight: ``[n, k]``, in the dtype that the engine would have it in.
        scale_2: the global scale of all that it is fused with.
        input_scale: None if activations are not quantized.
    """
    packed, scales, _ = nvfp4.quantize(weight, scale_2)
    names = packed_names(name)
    yield names.weight, packed
    yield names.weight_scale, scales
    yield names.weight_scale_2, scale_2.clone()
    if input_scale is not None:
        yield names.input_scale, input_scale.clone()


def fused_module(weight: str) -> str:
    """The matrix that an engine makes of this weight and others; all its parts share ``weight_scale_2``."""
    path, _, last = module_of(weight).rpartition(".")
    last = _FUSED.get(last, last)
    return f"{path}.{last}" if path else last


def input_module(weight: str) -> str:
    """Whose inputs the weight's ``input_scale`` is made of.

    That of the fused matrix; and all experts of a layer share one, since some of vLLM's kernels take the largest
    of theirs for all, and others each its own.
    """
    return _EXPERT.sub("experts.*", fused_module(weight))


@dataclass(frozen=True)
class QuantizationConfig:
    """What tells an engine of the format: ``hf_quant_config.json``, and ``quantization_config`` of ``config.json``."""

    hf_quant_config: dict[str, Any]
    quantization_config: dict[str, Any]


def quantization_config(
    quantized: Collection[str],
    kept: Iterable[str],
    version: str,
    activations: bool = True,
    dynamic_inputs: bool = False,
) -> QuantizationConfig:
    """The configuration of a checkpoint in ModelOpt's two spellings.

    Args:
        quantized: names of the quantized weights.
        kept: names of the other weights with two dimensions or more.
        version: of rlrefit, as the producer.
        activations: W4A4; otherwise W4A16.
        dynamic_inputs: each call makes the global scale of its own inputs. vLLM 0.21 does not read this, and takes
            ``input_scale``; TensorRT-LLM's LLM goes by an option of its own.

    Raises:
        ValueError: an engine that reads the exclusions would leave a quantized weight out too.
    """
    excluded = _excluded(kept)
    _check_no_quantized_is_excluded(excluded, quantized)
    algorithm = "NVFP4" if activations else "W4A16_NVFP4"
    producer = {"name": "modelopt", "version": f"rlrefit {version}"}
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    group: dict[str, Any] = {"weights": dict(four_bits), "targets": ["Linear"]}
    if activations:
        group["input_activations"] = {**four_bits, "dynamic": dynamic_inputs}
    return QuantizationConfig(
        hf_quant_config={
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": nvfp4.BLOCK,
                "exclude_modules": excluded,
            },
        },
        quantization_config={
            "config_groups": {"group_0": group},
            "ignore": excluded,
            "quant_algo": algorithm,
            "producer": producer,
            "quant_method": "modelopt",
        },
    )


def _excluded(kept: Iterable[str]) -> list[str]:
    """Modules to leave out; the experts of a layer, which an engine holds in one module, by one pattern."""
    modules = set()
    for weight in kept:
        if weight.endswith(".weight"):
            module = module_of(weight)
            expert = _EXPERT.search(module)
            modules.add(f"{module[: expert.start()]}experts*" if expert else module)
    return sorted(modules)


def _check_no_quantized_is_excluded(excluded: Iterable[str], quantized: Iterable[str]) -> None:
    """By vLLM's rule, the widest: a pattern, or a part of the module's name, in its own name or the fused one."""
    found = []
    names = {name for weight in quantized for name in (module_of(weight), fused_module(weight))}
    for pattern in excluded:
        hit = [name for name in sorted(names) if pattern in name or fnmatchcase(name, pattern)]
        if hit:
            found.append(f"{pattern!r} is also found in {hit[0]}")
    if found:
        raise ValueError(
            "engines would take these quantized layers for unquantized ones, by the names of layers that are left "
            "out: " + "; ".join(found) + ". Leave out both, or neither"
        )
