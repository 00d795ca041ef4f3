"""The layers' arithmetic and gradients, against autograd through the same steps one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.nvfp4 import Arithmetic
from rlrefit.workers.trainers.qat.functions import fake_weight, linear, straight_through


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
            out = functional.linear(inputs, straight_through(weight, fake_weight(weight, scale)))
        out.backward(gradient)
        assert x.grad is not None
        assert weight.grad is not None
        found.append((out.detach(), x.grad, weight.grad))
    for ours, steps in zip(*found, strict=True):
        assert torch.equal(ours, steps)
    assert bool(found[0][1].eq(0).any()) == (share == 0.5)


def test_no_element_of_a_weight_loses_its_gradient() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    scale = nvfp4.global_scale(weight.detach().abs().amax())
    straight_through(weight, fake_weight(weight, scale)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(64, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_element_is_never_cut_off_by_the_scale_made_of_it(dtype: torch.dtype) -> None:
    largest = (torch.rand(5000, generator=torch.Generator().manual_seed(2)) * 10).to(dtype)
    assert nvfp4.in_range(largest, nvfp4.global_scale(largest)).all()
    assert not nvfp4.in_range(largest * 1.01, nvfp4.global_scale(largest)).any()


def test_under_a_shared_scale_the_global_maximum_rounds_as_the_rounded_weight_does() -> None:
    weight = torch.randn(400, 16, generator=torch.Generator().manual_seed(3))
    for row in weight:
        assert row.abs().amax().bfloat16() == row.bfloat16().abs().amax()
