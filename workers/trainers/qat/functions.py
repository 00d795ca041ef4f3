"""Fake quantization in autograd.

Straight-through: the backward pass takes the quantized values for what they stand for. A weight's global scale is
made of its true maximum, so nothing of it is cut off and its gradient passes as it is. Elements of activations beyond
the range of a static scale have been cut off, and get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ....integration.quantize import nvfp4
from ....integration.quantize.nvfp4 import Arithmetic


def fake_weight(weight: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """What the engine reads of a weight, in its dtype and without a gradient."""
    with torch.no_grad():
        return nvfp4.dequantize(*nvfp4.quantize(weight, scale_2), dtype=weight.dtype)


def straight_through(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, whose gradient is the gradient of ``weight``."""
    result: torch.Tensor = _StraightThrough.apply(weight, value)  # type: ignore[no-untyped-call]
    return result


def fake_input(x: torch.Tensor, scale_2: torch.Tensor | None) -> torch.Tensor:
    """What the engine computes with in place of ``x``; ``x`` itself without a scale."""
    return x if scale_2 is None else nvfp4.fake_quantize(x, scale_2, Arithmetic.ACTIVATIONS)


def linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """``fake_input(x) @ fake_weight(weight).T``, which keeps nothing for the backward pass but ``x`` and ``weight``.

    So FSDP may free a gathered weight in between. What is quantized is computed once more instead.
    """
    result: torch.Tensor = _Linear.apply(x, weight, weight_scale, input_scale)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, weight_scale, input_scale)
        return functional.linear(fake_input(x, input_scale), fake_weight(weight, weight_scale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, weight_scale, input_scale = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ fake_weight(weight, weight_scale)
            if input_scale is not None:
                of_x = torch.where(nvfp4.in_range(x, input_scale), of_x, torch.zeros_like(of_x))
        if ctx.needs_input_grad[1]:
            inputs = fake_input(x, input_scale)
            of_weight = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
        return of_x, of_weight, None, None
