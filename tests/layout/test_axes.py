"""Tensors seen by axes, beside the elements' own numbers."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import Axes, Box, Fragment, common_axes, local_slice, overlap, volume
from rlrefit.integration.layout.fragments import Misfit

Factors = tuple[int, ...]


@st.composite
def groupings(draw: st.DrawFn, digits: Factors) -> Factors:
    """Neighbouring digits multiplied, so that any two groupings nest."""
    found = [digits[0]]
    for n in digits[1:]:
        if draw(st.booleans()):
            found.append(n)
        else:
            found[-1] *= n
    return tuple(found)


@st.composite
def axes_of(draw: st.DrawFn, digits: tuple[Factors, ...]) -> Axes:
    splits = tuple(draw(groupings(own)) for own in digits)
    return Axes(splits, tuple(draw(st.permutations(range(sum(map(len, splits)))))))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = (sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    return tuple((start, stop) for start, stop in edges)


def digits() -> st.SearchStrategy[tuple[Factors, ...]]:
    factors = st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple)
    return st.lists(factors | st.just((1,)), min_size=1, max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


@settings(deadline=None)
@given(st.data())
def test_a_fragment_seen_by_the_axes_of_both_sides_is_the_same_elements_of_the_same_storage(
    data: st.DataObject,
):
    sizes = data.draw(digits())
    own, others = data.draw(axes_of(sizes)), data.draw(axes_of(sizes))
    finer = own.common(others)
    assert finer is not None
    whole = numbered(own.full_shape)
    box = data.draw(boxes_in(own.shape))
    held = torch.empty([b - a for a, b in box], dtype=torch.int64)
    fragment = Fragment("w", own.full_shape, box, held, axes=own)
    held.copy_(fragment.part_of(whole))
    seen = fragment.seen_by(finer)
    assert overlap([part.box for part in seen]) is None
    assert sum(volume(part.box) for part in seen) == volume(box)
    for part in seen:
        assert torch.equal(part.view, part.part_of(whole))
        part.view.fill_(-1)
    assert (held == -1).all()


@settings(deadline=None)
@given(st.data())
def test_both_sides_boxes_meet_in_the_same_elements(data: st.DataObject):
    sizes = data.draw(digits())
    own, others = data.draw(axes_of(sizes)), data.draw(axes_of(sizes))
    finer = common_axes([own, others])
    assert finer == common_axes([own, others, own, Axes.of(own.full_shape)])
    assert finer is not None
    whole = numbered(own.full_shape)
    for axes in (own, others):
        seen = finer.see(whole)
        box = data.draw(boxes_in(axes.shape))
        elements = {
            number
            for part, _ in axes.cut(box, finer)
            for number in seen[local_slice(tuple((0, n) for n in seen.shape), part)].flatten().tolist()
        }
        expected = axes.see(whole)[tuple(slice(*r) for r in box)]
        assert elements == set(expected.flatten().tolist())


@settings(deadline=None)
@given(st.data())
def test_bounds_are_the_smallest_box_around_what_is_seen(data: st.DataObject):
    axes = data.draw(axes_of(data.draw(digits())))
    box = data.draw(boxes_in(axes.shape).filter(volume))
    inside = axes.see(numbered(axes.full_shape))[tuple(slice(*r) for r in box)].flatten()
    places = torch.unravel_index(inside, axes.full_shape)
    assert axes.bounds(box) == tuple((int(at.min()), int(at.max()) + 1) for at in places)


def test_alternating_columns_are_two_boxes():
    axes = Axes(((4,), (3, 2)), (1, 2, 0))
    columns = numbered((4, 6))
    gate, up = axes.see(columns)[:, 0], axes.see(columns)[:, 1]
    assert torch.equal(gate, columns[:, 0::2].T)
    assert torch.equal(up, columns[:, 1::2].T)


def test_the_first_ones_order_holds_and_factors_that_do_not_nest_have_no_common_axes():
    turned, split = Axes(((6,), (4,)), (1, 0)), Axes(((2, 3), (4,)), (0, 1, 2))
    assert turned.common(split) == Axes(((2, 3), (4,)), (2, 0, 1))
    assert common_axes([split, Axes(((3, 2), (4,)), (0, 1, 2))]) is None
    assert Axes.of((6, 4)).plain
    assert not turned.plain


@pytest.mark.parametrize(
    ("splits", "order"),
    [(((2, 1),), (0, 1)), (((),), ()), (((2, 3),), (0,)), (((2, 3),), (0, 0)), (((2,), (3,)), (0, 2))],
)
def test_axes_that_are_none_are_refused(splits: tuple[Factors, ...], order: Factors):
    with pytest.raises(ValueError, match="factor"):
        Axes(splits, order)


def test_a_fragment_with_another_tensors_axes_is_refused():
    with pytest.raises(Misfit, match="axes"):
        Fragment("w", (6, 4), ((0, 6), (0, 5)), torch.empty(6, 5), axes=Axes.of((6, 5)))
    with pytest.raises(Misfit, match="does not lie inside"):
        Fragment("w", (6, 4), ((0, 6), (0, 4)), torch.empty(6, 4), axes=Axes(((6,), (4,)), (1, 0)))
