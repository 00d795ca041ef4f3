"""NVFP4 and INT4 training of transformers models and other modules, under ``fully_shard`` or alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..fsdp.adapters import base_model, has_adapters
from ..fsdp.checkpoint import (
    CheckpointWeight,
    conversion_of,
    saved_names,
    trace_checkpoint,
    unwrapped,
    unwrapped_modules,
)
from ..fsdp.source import FSDPSource
from ..trained import note_trained
from .config import Linear, QATConfig, decoder_layers
from .layers import quantize_experts, quantize_linear
from .model import QAT

Weights = Mapping[str, Sequence[CheckpointWeight]]
_STACKS = ("gate_up_proj", "down_proj")


def quantize_module(model: nn.Module, config: QATConfig, group: dist.ProcessGroup | None = None) -> QAT:
    """Make the linear layers of ``model`` compute in NVFP4 or INT4; before ``fully_shard`` or after it.

    ``nn.Linear`` (without tensor parallelism) and transformers' stacks of experts. A collective of all trainer ranks.

    Raises:
        ValueError: it can't be done as asked; tells all that is wrong.
        RefitError: the model's weights can't be told from its tensors.
    """
    model = base_model(model)
    _require_no_adapters(model)
    weights = _weights_by_parameter(model)
    linears: list[Linear] = []
    for path, module in unwrapped_modules(model):
        if isinstance(module, nn.Linear):
            linears += _of_linear(path, module, weights)
        elif _is_stack(module):
            linears += _of_stack(path, module, weights)
    names = [weight.name for found in weights.values() for weight in found]
    qat = QAT(config, linears, names, lambda: _source_of(model), _decoder_layers(model), group)
    for path, module in unwrapped_modules(model):
        held = {name: [w.name for w in weights.get(_joined(path, name), ())] for name in ("weight", *_STACKS)}
        if isinstance(module, nn.Linear) and qat.weights.intersection(held["weight"]):
            quantize_linear(module, qat.quantizer(*held["weight"]))
        elif _is_stack(module) and qat.weights.intersection(held["gate_up_proj"]):
            first, second = (_of_each_expert(weights[_joined(path, name)]) for name in _STACKS)
            quantize_experts(module, qat.stack_quantizer(first), qat.stack_quantizer(second))
    note_trained(model, qat.formats)
    qat.watch(model)
    qat.watch_contents(model)
    return qat


def _require_no_adapters(model: nn.Module) -> None:
    if has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} has LoRA adapters, which add to weights that are quantized for themselves in training, and are merged "
            "before they are quantized for the engine: it would compute something else. Train all weights, or without quantization"
        )


def _source_of(model: nn.Module) -> FSDPSource:
    _require_no_adapters(model)  # that came in the meantime
    return FSDPSource(model)


def _decoder_layers(model: nn.Module) -> int | None:
    from transformers import PreTrainedModel

    return decoder_layers(model.config) if isinstance(model, PreTrainedModel) else None


def _weights_by_parameter(model: nn.Module) -> Weights:
    state = {unwrapped(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: (tuple(state[name].shape), state[name].dtype) for name in saved_names(model, state)}
    found: dict[str, list[CheckpointWeight]] = defaultdict(list)
    for weight in trace_checkpoint(conversion_of(model), shapes):
        for name in weight.made_of:
            found[name].append(weight)
    return found


def _of_linear(path: str, module: nn.Linear, weights: Weights) -> list[Linear]:
    found = weights.get(_joined(path, "weight"), ())
    reason = ""
    if type(module).forward is not nn.Linear.forward:
        reason = f"{type(module).__name__} computes in its own way"
    elif len(found) > 1 or any(w.part is None or w.shape != tuple(module.weight.shape) for w in found):
        reason = "the checkpoint has its parameter in another form"
    return [Linear(w.name, w.shape[-1], reason) for w in found]


def _is_stack(module: Any) -> bool:
    """Whether it is one of transformers' modules of experts, by what its decorator gives all of them."""
    return hasattr(module, "is_transposed") and all(
        isinstance(getattr(module, name, None), torch.Tensor) for name in _STACKS
    )


def _of_stack(path: str, module: Any, weights: Weights) -> list[Linear]:
    reason = ""
    if module.is_transposed or module.has_bias or not module.has_gate or not module.is_concatenated:
        reason = (
            f"{type(module).__name__} keeps its experts transposed, with biases, or gates between up columns"
        )
    return [
        Linear(
            weight.name,
            weight.shape[-1],
            reason or ("" if weight.part else f"no part of one: {weight.reason}"),
        )
        for name in _STACKS
        for weight in weights.get(_joined(path, name), ())
    ]


def _of_each_expert(found: Sequence[CheckpointWeight]) -> list[str]:
    """One of the weights of each expert, in the order of the stack."""
    of_expert = {weight.part.box[0][0]: weight.name for weight in found if weight.part}
    return [of_expert[expert] for expert in sorted(of_expert)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
