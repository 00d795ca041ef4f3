"""Fake quantization in autograd.

Straight-through: the backward pass takes the quantized values for what they stand for. A weight's scales are made of its true
maxima, so its gradient passes as it is: NVFP4 cuts nothing off, and INT4 at most half a step of a group's largest element. Elements of
activations beyond the range of a static scale have been cut off, and get no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ....integration.errors import RefitError
from ....integration.quantize import int4, nvfp4
from ....integration.quantize.formats import Int4, Nvfp4
from ....integration.quantize.nvfp4 import Arithmetic
from .config import NVFP4


def fake_weight(
    weight: torch.Tensor, scale_2: torch.Tensor | None, format: Nvfp4 | Int4 = NVFP4
) -> torch.Tensor:
    """What the engine reads of a weight, in its dtype and without a gradient.

    Args:
        weight: ``[..., k]``, whole or a part that cuts no block.
        scale_2: its global scale; None in a format without.
        format: of the engine.

    Raises:
        RefitError: INT4 is made of another dtype of 16 bits, which the weight can't be told in.
    """
    with torch.no_grad():
        if isinstance(format, Int4):
            if weight.dtype not in (torch.float32, format.scale_dtype):
                raise RefitError(
                    f"a layer computes with a weight in {weight.dtype}, and INT4 is made of it in {format.scale_dtype}: the engine would "
                    f"get other codes. Compute in {format.scale_dtype} or float32, or give QATConfig(format=Int4(…, dtype=…)) the "
                    "dtype that is exported",
                    stage="quantize",
                )
            made_of = weight.to(format.scale_dtype)
            return int4.round_trip(made_of, format.group, format.scale_rule).to(weight.dtype)
        return nvfp4.round_trip(weight, scale_2)


def straight_through(
    weights: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``values``, whose gradients are those of ``weights``."""
    result: tuple[torch.Tensor, ...] = _StraightThrough.apply(*weights, *values)  # type: ignore[no-untyped-call]
    return result


def fake_input(x: torch.Tensor, scale_2: torch.Tensor | None) -> torch.Tensor:
    """What the engine computes with in place of ``x``; ``x`` itself without a scale."""
    return x if scale_2 is None else nvfp4.fake_quantize(x, scale_2, Arithmetic.ACTIVATIONS)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    format: Nvfp4 | Int4 = NVFP4,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """``fake_input(x) @ fake_weight(weight).T``, which keeps nothing for the backward pass but ``x`` and ``weight``.

    So FSDP may free a gathered weight in between. What is quantized is computed once more instead.

    Args:
        x: ``[..., k]``; ``[rows, k]`` with ``ends``.
        weight: ``[n, k]``, or experts' ``[experts, n, k]``.
        weight_scale: as in :func:`fake_weight`; one for each expert.
        input_scale: as in :func:`fake_input`; or FP32 ``[rows]``, one for each row.
        format: of the engine.
        ends: int32 ``[experts]``, how many rows there are up to each expert's last one: rows lie in the order of experts.
    """
    result: torch.Tensor = _Linear.apply(x, weight, weight_scale, input_scale, format, ends)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights_and_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.view_as(value) for value in weights_and_values[len(weights_and_values) // 2 :])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *gradients, *[None] * len(gradients)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        input_scale: torch.Tensor | None,
        format: Nvfp4 | Int4,
        ends: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.format = format
        ctx.save_for_backward(x, weight, weight_scale, input_scale, ends)
        inputs = x if input_scale is None else nvfp4.round_trip(x, input_scale, Arithmetic.ACTIVATIONS)
        value = fake_weight(weight, weight_scale, format)
        if ends is None:
            return functional.linear(inputs, value)
        return functional.grouped_mm(inputs, value.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, weight_scale, input_scale, ends = ctx.saved_tensors
        of_x = of_weight = inside = None
        inputs = x
        if input_scale is not None:
            inputs, inside = nvfp4.round_trip_in_range(x, input_scale, Arithmetic.ACTIVATIONS)
        if ctx.needs_input_grad[1]:
            turned, rows = gradient.flatten(0, -2).t(), inputs.flatten(0, -2)
            of_weight = turned @ rows if ends is None else functional.grouped_mm(turned, rows, offs=ends)
        # Freed before what takes its place.
        del inputs
        if ctx.needs_input_grad[0]:
            value = fake_weight(weight, weight_scale, ctx.format)
            of_x = gradient @ value if ends is None else functional.grouped_mm(gradient, value, offs=ends)
            if inside is not None:
                of_x = torch.where(inside, of_x, 0)
        return of_x, of_weight, None, None, None, None
