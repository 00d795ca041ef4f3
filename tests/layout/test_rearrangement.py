"""Opaque steps run on numbers, beside what they do to values."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout.rearrangement import NotRearranged, Rearrangement, recover

CPU = torch.device("cpu")
DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))


def replayed(by: Rearrangement, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``tensor`` written through strided views into memory as ``made``."""
    box = tuple((0, n) for n in by.shape)
    found = by.boxed(box)
    assert found is not None
    offset, digits = found
    flat = [digit for own in digits for digit in own]
    out = torch.zeros_like(made)
    target = out.reshape(-1).as_strided([d.size for d in flat], [d.stride for d in flat], offset)
    target.copy_(tensor.reshape(target.shape))
    return out


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """A shape, and a reshape, a transpose, a padding and another transpose."""
    factors = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    factors[0][0] *= draw(st.sampled_from((1, 30)))  # of more digits than one
    shape = tuple(map(prod, factors))
    split = [n for own in factors for n in own]
    order = draw(st.permutations(range(len(split))))
    padding = [draw(st.sampled_from((0, 0, 1, 3))) for _ in range(2 * len(split))]
    # By the last dimension first, as torch has it. Nine padded ones would make thousands of millions of elements.
    padded = zip((split[i] for i in reversed(order)), padding[::2], padding[1::2], strict=True)
    assume(prod(n + before + after for n, before, after in padded) <= 1 << 20)
    again = draw(st.permutations(range(len(split))))

    def step(tensor: torch.Tensor) -> torch.Tensor:
        turned = tensor.reshape(split).permute(order)
        return torch.nn.functional.pad(turned, padding).permute(again).contiguous()

    return shape, step


@settings(max_examples=60, deadline=None)
@given(steps(), DTYPES)
def test_a_reshape_a_transpose_and_a_padding_are_found_out_and_replayed_bit_for_bit(
    drawn: tuple[tuple[int, ...], Any], dtype: torch.dtype
):
    shape, step = drawn
    [by] = recover(lambda given: {"w": step(given["w"])}, {"w": (shape, dtype)}, CPU).values()
    values = torch.randn(shape).to(dtype)
    made = step(values)
    assert torch.equal(replayed(by, values, made), made)


def test_several_tensors_are_found_out_together():
    def step(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"w": given["w"].transpose(1, 2).contiguous(), "b": given["b"]}

    tensors = {"w": ((3, 4, 200), torch.bfloat16), "b": ((3, 4), torch.float32)}
    found = recover(step, tensors, CPU)
    assert found["b"] == Rearrangement((3, 4), 0, (tuple(range(0, 12, 4)), (0, 1, 2, 3)))
    assert found["b"].kept
    assert not found["w"].kept


def test_swapped_halves_are_boxes_each_by_itself():
    [by] = recover(lambda given: {"w": given["w"].roll(4, 0)}, {"w": ((8, 3), torch.bfloat16)}, CPU).values()
    assert by.boxed(((0, 8), (0, 3))) is None
    assert by.boxed(((0, 4), (0, 3))) == (12, (((4, 3),), ((3, 1),)))
    assert by.boxed(((4, 8), (1, 3))) == (1, (((4, 3),), ((2, 1),)))


def _quantized(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor / tensor.abs().amax()).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "step",
    [
        lambda w: w * 2,
        lambda w: w.abs(),
        lambda w: w + 1,
        lambda w: w.clamp(max=100),
        lambda w: w.float(),
        _quantized,
        lambda w: w.t(),
        lambda w: w[:3],
        lambda w: w.repeat(2, 1),
        lambda w: w.sort(0).values,
        lambda w: torch.cat([w[:1].flip(1), w[1:]]),
        lambda w: torch.nn.functional.pad(w, (0, 1), value=7),
        lambda w: w.new_empty(0),
    ],
    ids=[
        "a scale",
        "a sign",
        "a sum",
        "a limit",
        "another dtype",
        "codes",
        "a view",
        "a part",
        "copies",
        "an order by value",
        "an order by row",
        "another padding",
        "nothing",
    ],
)
def test_what_does_more_than_put_elements_elsewhere_is_refused(step: Callable[[torch.Tensor], torch.Tensor]):
    with pytest.raises(NotRearranged):
        recover(lambda given: {"w": step(given["w"])}, {"w": ((6, 5), torch.bfloat16)}, CPU)


def test_a_tensor_that_went_into_another_and_one_that_holds_no_numbers_are_refused():
    tensors = {"v": ((4,), torch.bfloat16), "w": ((4,), torch.bfloat16)}
    with pytest.raises(NotRearranged):
        recover(lambda given: {"v": given["w"], "w": given["v"]}, tensors, CPU)
    with pytest.raises(NotRearranged):
        recover(lambda given: {"w": given["w"]}, tensors, CPU)
    with pytest.raises(NotRearranged):
        recover(dict, {"w": ((4,), torch.float8_e4m3fn)}, CPU)
