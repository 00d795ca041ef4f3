"""The layers' arithmetic and gradients, against autograd through the same steps one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from rlrefit.integration.quantize import blocks, nvfp4
from rlrefit.integration.quantize.nvfp4 import Arithmetic
from rlrefit.workers.trainers.qat.functions import fake_weight, linear, straight_through
from rlrefit.workers.trainers.qat.scales import InputScales


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5, 64), (48, 64), (3, 5, 48))
    )
    return x.requires_grad_(), weight.requires_grad_(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [None, 1.0, 0.5])
def test_the_layer_that_keeps_nothing_computes_what_its_steps_do(
    dtype: torch.dtype, share: float | None
) -> None:
    found = []
    for in_one in (True, False):
        x, weight, gradient = tensors(dtype)
        scale = nvfp4.global_scale(weight.detach().abs().amax())
        input_scale = None if share is None else nvfp4.global_scale(x.detach().abs().amax() * share)
        if in_one:
            out = linear(x, weight, scale, input_scale)
        else:
            inputs = x if share is None else nvfp4.fake_quantize(x, input_scale, Arithmetic.ACTIVATIONS)
            out = functional.linear(inputs, *straight_through([weight], [fake_weight(weight, scale)]))
        out.backward(gradient)
        assert x.grad is not None
        assert weight.grad is not None
        found.append((out.detach(), x.grad, weight.grad))
    for ours, steps in zip(*found, strict=True):
        assert torch.equal(ours, steps)
    _, of_inputs, of_weights = found[0]
    assert bool(of_inputs.eq(0).any()) == (share == 0.5)
    assert of_weights.ne(0).all()


def of_stack(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a product of a stack of experts gives in one, output and gradients, beside those of one expert after another.

    The first expert has no tokens, nor has the last.
    """
    generator = torch.Generator().manual_seed(6)
    counts = (0, 9, 1, 22, 0)
    rows, stack, gradient = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((sum(counts), 64), (len(counts), 48, 64), (sum(counts), 48))
    )
    scales = nvfp4.global_scale(stack.abs().amax(dim=(1, 2)))
    experts = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    inputs = InputScales(["model.layers.0.mlp.down_proj.weight"], device, None, dynamic=True)
    for input_scale in (
        None,
        nvfp4.global_scale(blocks.largest_magnitude(rows) * 0.5),
        inputs.of(0, rows, experts),
    ):
        x, weight = (part.clone().requires_grad_() for part in (rows, stack))
        out = linear(x, weight, scales, input_scale, ends=ends)
        out.backward(gradient)
        ours = out.detach(), x.grad, weight.grad
        x, weight = (part.clone().requires_grad_() for part in (rows, stack))
        outs = []
        for expert, part in enumerate(x.split(counts)):
            scale = input_scale
            if input_scale is not None and input_scale.dim():
                scale = nvfp4.global_scale(blocks.largest_magnitude(part))
            outs.append(linear(part, weight[expert], scales[expert], scale))
        torch.cat(outs).backward(gradient)
        yield from zip(ours, (torch.cat(outs).detach(), x.grad, weight.grad), strict=True)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_experts_computes_in_one_what_its_experts_do_one_after_another(dtype: torch.dtype) -> None:
    for ours, theirs in of_stack(dtype, torch.device("cpu")):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_element_is_never_cut_off_by_the_scale_made_of_it(dtype: torch.dtype) -> None:
    largest = (torch.rand(5000, generator=torch.Generator().manual_seed(2)) * 10).to(dtype)
    assert nvfp4.in_range(largest, nvfp4.global_scale(largest)).all()
    assert not nvfp4.in_range(largest * 1.01, nvfp4.global_scale(largest)).any()


def test_scales_of_inputs_are_loaded_as_they_were_saved_whatever_the_default_dtype_of_the_process_is() -> (
    None
):
    saved = {"model.layers.0.mlp.down_proj": 1.2345678806304932}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        scales = InputScales(
            ["model.layers.0.mlp.down_proj.weight"], torch.device("cpu"), None, dynamic=False
        )
        scales.load_state_dict(saved)
    finally:
        torch.set_default_dtype(before)
    assert scales.state_dict() == saved
