"""The layers' arithmetic and gradients, against autograd through the same steps one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from rlrefit.integration.quantize import blocks, nvfp4
from rlrefit.integration.quantize.formats import Int4, Nvfp4
from rlrefit.integration.quantize.nvfp4 import Arithmetic
from rlrefit.workers.trainers.qat import layers
from rlrefit.workers.trainers.qat.functions import fake_weight, linear, straight_through
from rlrefit.workers.trainers.qat.layers import (
    Quantizer,
    quantize_experts,
    quantize_linear,
    quantize_parallel,
)
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
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    inputs = InputScales(["model.layers.0.mlp.down_proj.weight"], device, None, dynamic=True)
    for input_scale in (
        None,
        nvfp4.global_scale(blocks.largest_magnitude(rows) * 0.5),
        inputs.of(0, rows, ends),
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


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_parameters_of_a_group_are_quantized_as_each_is_and_get_their_own_gradients(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = Int4(32)
    group = nn.Module()
    generator = torch.Generator().manual_seed(7)
    for expert in range(5):
        group.register_parameter(f"weight{expert}", nn.Parameter(torch.randn(8, 64, generator=generator)))
    monkeypatch.setattr(layers, "_AT_ONCE_BYTES", at_once * 8 * 64 * 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [part @ weight.T for part, weight in zip(x, group._parameters.values(), strict=True)]
        )  # type: ignore[union-attr]

    group.forward = forward  # type: ignore[method-assign]
    held = dict(group.named_parameters())
    quantize_parallel(group, {name: Quantizer(format, None, 0, (), None, 0) for name in held})
    x = torch.randn(5, 3, 64, generator=generator)
    out = group(x)
    values = [fake_weight(weight, None, format) for weight in held.values()]
    assert torch.equal(out, torch.cat([part @ value.T for part, value in zip(x, values, strict=True)]))
    out.sum().backward()
    for weight, part in zip(held.values(), x, strict=True):
        assert torch.equal(weight.grad, torch.ones(8, 3) @ part)
    assert dict(group.named_parameters()) == held


class _Experts(nn.Module):
    """A stack of experts as transformers has them."""

    def __init__(self, experts: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        for name, shape in (("gate_up_proj", (experts, 64, 64)), ("down_proj", (experts, 64, 32))):
            weight = torch.randn(shape, generator=generator).bfloat16().to(dtype)
            self.register_parameter(name, nn.Parameter(weight))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class _GivenScales:
    """In the place of the scales of weights, which are 1 here."""

    def check_versions(self, positions: tuple[int, ...]) -> None:
        pass

    def of(self, positions: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(torch.as_tensor(positions).shape)


def _quantizer(at: int | torch.Tensor) -> Quantizer:
    inputs = InputScales(["model.layers.0.mlp.down_proj.weight"], torch.device("cpu"), None, dynamic=True)
    return Quantizer(Nvfp4(), _GivenScales(), at, (), inputs, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 3])
def test_dynamic_scales_of_experts_need_no_more_tokens_than_there_are(tokens: int) -> None:
    stack = _Experts(7, torch.float32)
    quantize_experts(stack, _quantizer(torch.arange(7)), _quantizer(torch.arange(7)))
    choice = torch.tensor([[6, 2]]).expand(tokens, 2)
    hidden = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(9))
    found = stack(hidden, choice, torch.full((tokens, 2), 0.5))
    assert found.shape == hidden.shape
    assert found.isfinite().all()
    assert found.any()


def test_under_autocast_scales_are_made_of_what_is_multiplied() -> None:
    generator = torch.Generator().manual_seed(10)
    for _ in range(50):
        x = torch.randn(4, 64, generator=generator)
        weight = torch.randn(8, 64, generator=generator)
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            module = nn.Linear(64, 8, bias=False, dtype=dtype)
            module.weight.data.copy_(weight)
            quantize_linear(module, _quantizer(0))
            given = x.to(dtype, copy=True).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                out = module(given)
            out.sum().backward()
            assert given.grad is not None
            found.append((out.detach(), given.grad.bfloat16()))
        for with_autocast, without in zip(*found, strict=True):
            assert torch.equal(with_autocast, without)
        assert found[0][1].flatten()[x.abs().argmax()] != 0
    choice, weights = torch.tensor([[0, 2], [2, 1]]), torch.full((2, 2), 0.5)
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        stack = _Experts(3, dtype)
        quantize_experts(stack, _quantizer(torch.arange(3)), _quantizer(torch.arange(3)))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            outs.append(stack(x[:2].to(dtype), choice, weights))
    assert outs[0].dtype == torch.float32
    assert torch.equal(outs[0].bfloat16(), outs[1].to(torch.bfloat16))
