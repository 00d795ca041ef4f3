"""Layers that compute with quantized weights and inputs.

Only ``forward`` of the one module is replaced. Classes, parameters and their names stay what they are, so optimizers,
checkpoints, FSDP and Megatron-Bridge see the model that they know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ....integration.errors import RefitError
from ....integration.quantize.formats import Int4, Nvfp4
from .functions import fake_input, fake_weight, linear, straight_through
from .scales import InputScales, WeightScales

# Megatron-core's layers over Transformer Engine, and its own, by the names of their classes.
PARALLEL = frozenset(
    {
        "ColumnParallelLinear",
        "RowParallelLinear",
        "TELinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    }
)
NORMED = "TELayerNormColumnParallelLinear"
# Its groups of experts.
EXPERTS = frozenset({"TEGroupedMLP", "SequentialMLP"})
# Of parameters that are copied beside each other to be quantized in one.
_AT_ONCE_BYTES = 128 << 20


@dataclass(eq=False)
class Quantizer:
    """The scales of one parameter and of what it is multiplied with.

    Attributes:
        format: of the parameter.
        weights: all global scales of weights; None in a format without.
        at: this one's, or one for each expert of a stack.
        places: the same, as numbers.
        inputs: all scales of inputs; None if they are not quantized.
        input_at: this layer's.
    """

    format: Nvfp4 | Int4
    weights: WeightScales | None
    at: int | torch.Tensor
    places: tuple[int, ...]
    inputs: InputScales | None
    input_at: int
    _value: torch.Tensor | None = field(default=None, init=False)
    # The generation of scales, the weight's place and its version.
    _made_for: tuple[int, int, int] = field(default=(-1, 0, 0), init=False)

    def calibrates(self, x: torch.Tensor) -> bool:
        """Whether the layer is to compute as ever, as inputs are only looked at."""
        if self.inputs is None or not self.inputs.calibrating:
            return False
        self.inputs.observe(self.input_at, x)
        return True

    def weight_scale(self, weight: torch.Tensor) -> torch.Tensor | None:
        """``weight_scale_2`` for the weight as it is passed to the product, and where that is computed; None in a format without.

        Scales are kept on the rank's GPU, and a model may be computed on the host beside it.

        Raises:
            RefitError: the weight was written since the last refresh.
        """
        if self.weights is None:
            return None
        self.weights.check_versions(self.places)
        return self.weights.of(self.at, weight.dtype).to(weight.device)

    def input_scale(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor | None:
        """``input_scale`` for these inputs, where they are; as :meth:`.scales.InputScales.of`."""
        return None if self.inputs is None else self.inputs.of(self.input_at, x, ends).to(x.device)

    def holds(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The quantized value that was kept of a weight, if it is that of the weight as it is and where it is.

        Raises:
            RefitError: the weight was written since the last refresh.
        """
        if self.weights is None:
            return None
        self.weights.check_versions(self.places)
        generation, place, version = self._made_for
        if generation == self.weights.generation and version != weight._version:
            self.weights.now_stale("a weight was written after the last refresh()")
        self.weights.require_fresh()
        return self._value if (generation, place) == (self.weights.generation, weight.data_ptr()) else None

    def keep(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Have the quantized value of a weight stay in memory, for the passes of one step.

        In a format without global scales nothing tells of a new step, so each forward pass computes it anew, and nothing stays.
        """
        if self.weights is not None:
            self._value = value
            self._made_for = self.weights.generation, weight.data_ptr(), weight._version

    def release(self) -> None:
        """Free the quantized value; the next use computes it again."""
        self._value = None


def quantize_linear(module: nn.Linear, quantizer: Quantizer) -> None:
    """For ``nn.Linear`` under FSDP or not; nothing is kept for the backward pass that it does not keep already."""
    original = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = _as_autocast_has_it(x)
        if quantizer.calibrates(x):
            return original(x)
        out = _multiplied(x, module.weight, quantizer, quantizer.input_scale(x))
        return out if module.bias is None else out + module.bias.to(out.dtype)

    module.forward = forward  # type: ignore[method-assign]


def quantize_experts(module: Any, gate_up: Quantizer, down: Quantizer) -> None:
    """For transformers' stacks of experts (``gate_up_proj`` ``[experts, 2 · n, k]``, ``down_proj``), all in one product.

    With dynamic scales each expert's tokens make one for its second layer.
    """

    def forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        kind, hidden = hidden.dtype, _as_autocast_has_it(hidden)
        # Tokens as often as they are routed, in the order of experts.
        experts, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(len(module.gate_up_proj), device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        rows = hidden[order // top_k_index.shape[-1]]
        if gate_up.calibrates(hidden):
            inner = _as_autocast_has_it(module._apply_gate(_grouped(rows, module.gate_up_proj, ends)))
            down.calibrates(inner)
            out = _grouped(inner, module.down_proj, ends)
        else:
            scale = gate_up.input_scale(hidden)
            inner = module._apply_gate(_multiplied(rows, module.gate_up_proj, gate_up, scale, ends))
            inner = _as_autocast_has_it(inner)
            scale = down.input_scale(inner, ends)
            out = _multiplied(inner, module.down_proj, down, scale, ends)
        out = out * top_k_weights.flatten()[order, None]
        return out[order.argsort()].unflatten(0, top_k_index.shape).sum(1).to(kind)

    module.forward = forward


def quantize_parallel(module: nn.Module, quantizers: Mapping[str, Quantizer]) -> None:
    """For Megatron's linear layers and grouped experts: their own code runs, with other weights and inputs.

    The quantized values of ``quantizers``' parameters stay in memory between passes (:meth:`Quantizer.keep`).
    """
    original = module.forward
    first = next(iter(quantizers.values()))

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.calibrates(x):
            return original(x, *args, **kwargs)
        with _in_place_of_parameters(module, _kept(module, quantizers)):
            return original(fake_input(x, first.input_scale(x)), *args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def weigh_outputs(module: Any) -> None:
    """Have a group of Megatron's experts multiply by the router's probabilities behind the second layer.

    Megatron does it before, which is the same but for quantization: engines quantize what is not multiplied yet, and
    a scale that is calibrated on products with probabilities would cut it off.
    """
    if module.config.moe_apply_probs_on_input:  # as engines do it for these models, too
        return
    original = module.forward

    def forward(
        hidden: torch.Tensor, tokens_per_expert: Any, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = original(hidden, tokens_per_expert, torch.ones_like(probs))
        if bias is not None:
            raise RefitError(
                f"{type(module).__name__} returns biases beside its output, which would go without the router's "
                "probabilities; this version of Megatron-core is not known. Leave experts out by exclude",
                stage="quantize",
            )
        return (out * probs.unsqueeze(-1)).to(out.dtype), None

    module.forward = forward


def quantize_normed(module: Any, quantizer: Quantizer) -> None:
    """For Transformer Engine's norm and linear layer in one, whose kernel never shows the inputs of the product.

    Norm and product are computed one after another, by torch and Megatron-core's own parallel layer.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    original = module.forward
    config = module.config
    group = parallel_state.get_tensor_model_parallel_group()
    gathers = config.sequence_parallel and group.size() > 1
    returns_bias = getattr(module, "te_return_bias", getattr(module, "skip_bias_add", False))

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = _normed(module, config, x)
        if quantizer.calibrates(normed):
            result: tuple[torch.Tensor, torch.Tensor | None] = original(x, *args, **kwargs)
            return result
        bias = module.bias if module.bias is not None and module.bias.numel() else None
        out = linear_with_grad_accumulation_and_async_allreduce(
            fake_input(normed, quantizer.input_scale(normed)),
            _kept(module, {"weight": quantizer})["weight"],
            None if returns_bias else bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=group.size() > 1 and not gathers,
            sequence_parallel=gathers,
            tp_group=group,
        )
        return out, bias if returns_bias else None

    module.forward = forward


def _multiplied(
    x: torch.Tensor,
    weight: torch.Tensor,
    quantizer: Quantizer,
    input_scale: torch.Tensor | None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    if isinstance(weight, DTensor):
        raise RefitError(
            "a quantized layer computes with a DTensor, so it is tensor parallel, or runs outside of the module that "
            "fully_shard gathers it for; training in four bits knows FSDP alone. Use Megatron for tensor parallelism, or "
            "leave the layer out by exclude",
            stage="quantize",
        )
    weight = _as_autocast_has_it(weight)
    return linear(x, weight, quantizer.weight_scale(weight), input_scale, quantizer.format, ends)


def _grouped(rows: torch.Tensor, stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows times their experts' weights, as :func:`.functions.linear` has both."""
    return functional.grouped_mm(rows, _as_autocast_has_it(stack).transpose(1, 2), offs=ends)


def _as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """A custom autograd function is no product that autocast knows. Scales are made of what is multiplied."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _kept(module: nn.Module, quantizers: Mapping[str, Quantizer]) -> dict[str, torch.Tensor]:
    """What takes the place of parameters of one shape and format; what has to be computed is computed many at a time."""
    weights: dict[str, Any] = {name: module._parameters[name] for name in quantizers}
    values = {name: quantizer.holds(weights[name]) for name, quantizer in quantizers.items()}
    due = [name for name, value in values.items() if value is None]
    for name in due:
        # So that old ones are gone before all new ones are there.
        quantizers[name].release()
    for names in _at_once(due, weights):
        first = quantizers[names[0]]
        with torch.no_grad():
            # A group of experts has a parameter for each.
            stack = (
                weights[names[0]][None] if len(names) == 1 else torch.stack([weights[name] for name in names])
            )
            at = torch.tensor([quantizers[name].at for name in names])
            scales = None if first.weights is None else first.weights.of(at, stack.dtype).to(stack.device)
            made = fake_weight(stack, scales, first.format).unbind()
        for name, value in zip(names, made, strict=True):
            quantizers[name].keep(weights[name], value)
            values[name] = value
    return dict(zip(weights, straight_through([*weights.values()], [*values.values()]), strict=True))


def _at_once(names: Sequence[str], weights: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
    """As many parameters of one size as may be copied beside each other."""
    if names:
        count = max(1, _AT_ONCE_BYTES // weights[names[0]].nbytes)
        yield from (names[i : i + count] for i in range(0, len(names), count))


@contextmanager
def _in_place_of_parameters(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The module shows ``values`` for its parameters, as ``torch.func.functional_call`` does."""
    parameters: dict[str, Any] = module._parameters
    kept = {name: parameters[name] for name in values}
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(kept)


def _normed(module: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    """In FP32, as Transformer Engine computes it."""
    weight = module.layer_norm_weight.float()
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        normed = functional.rms_norm(x.float(), (x.shape[-1],), weight, config.layernorm_epsilon)
    else:
        bias = module.layer_norm_bias.float()
        normed = functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, config.layernorm_epsilon)
    return normed.to(x.dtype)
