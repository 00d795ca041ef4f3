"""Boxes against brute force on index tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import (
    Box,
    BoxIndex,
    coverage_gap,
    intersect,
    overlap,
    split,
    subtract,
    volume,
)
from rlrefit.integration.layout.fragments import local_slice

SHAPE = (5, 4, 6)
at_leisure = settings(deadline=None)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    ranges = []
    for n in SHAPE:
        start = draw(st.integers(0, n))
        ranges.append((start, draw(st.integers(start, n))))
    return tuple(ranges)


def elements(box: Box) -> set[int]:
    whole = torch.arange(torch.Size(SHAPE).numel()).reshape(SHAPE)
    return set(whole[tuple(slice(a, b) for a, b in box)].flatten().tolist())


@at_leisure
@given(boxes(), boxes())
def test_an_intersection_holds_the_common_elements_and_nothing_else(a: Box, b: Box) -> None:
    common = intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


@at_leisure
@given(boxes(), boxes())
def test_a_difference_is_disjoint_and_holds_what_is_left(a: Box, b: Box) -> None:
    pieces = [elements(p) for p in subtract(a, b)]
    assert set().union(*pieces) == elements(a) - elements(b)
    assert sum(map(len, pieces)) == len(elements(a) - elements(b))


@at_leisure
@given(boxes(), st.integers(1, 30))
def test_a_split_box_keeps_every_element_once_and_its_pieces_fit(box: Box, limit: int) -> None:
    pieces = split(box, limit)
    assert all(volume(p) <= limit for p in pieces)
    assert sorted(e for p in pieces for e in elements(p)) == sorted(elements(box))


@at_leisure
@given(st.lists(boxes(), max_size=6))
def test_an_overlap_is_found_exactly_when_there_is_one(candidates: list[Box]) -> None:
    found = overlap(candidates)
    sizes = [len(elements(b)) for b in candidates]
    disjoint = sum(sizes) == len(set().union(*(elements(b) for b in candidates)))
    assert (found is None) == disjoint
    if found:
        assert elements(candidates[found[0]]) & elements(candidates[found[1]])


@at_leisure
@given(boxes(), st.lists(boxes(), max_size=8))
def test_an_index_finds_the_boxes_that_meet_one_along_the_first_dimension(
    box: Box, candidates: list[Box]
) -> None:
    (start, stop), found = box[0], BoxIndex(candidates).near(box)
    assert found == [i for i, ((lo, hi), *_) in enumerate(candidates) if lo < stop and hi > start]
    assert {i for i, other in enumerate(candidates) if intersect(box, other)} <= set(found)


def test_an_index_of_scalars_finds_all() -> None:
    assert BoxIndex([(), ()]).near(()) == [0, 1]


@at_leisure
@given(boxes(), st.lists(boxes(), max_size=5))
def test_a_gap_is_reported_exactly_when_an_element_is_uncovered(target: Box, pieces: list[Box]) -> None:
    gap = coverage_gap(target, pieces)
    missing = elements(target) - set().union(*(elements(p) for p in pieces))
    assert (gap is None) == (not missing)
    if gap:
        assert elements(gap) <= missing


@at_leisure
@given(boxes(), boxes())
def test_a_local_slice_finds_the_part_inside_its_box(box: Box, other: Box) -> None:
    part = intersect(box, other)
    if part is None:
        return
    whole = torch.arange(torch.Size(SHAPE).numel()).reshape(SHAPE)
    local = whole[tuple(slice(a, b) for a, b in box)]
    assert set(local[local_slice(box, part)].flatten().tolist()) == elements(part)
