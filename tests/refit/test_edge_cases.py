"""Odd sizes, dtypes and shares of weights, bit for bit; and plans that must not be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlrefit.integration.errors import PlanError
from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.plan import CHECKSUM_BYTES
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.plan.catalog import Param, Part

from .mappings import Mapping, Worlds, wrong_refits
from .stored import StoredDestination, StoredRank, values_of

BF16 = torch.bfloat16
BOTH = ("p2p", "golden")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


def stored(spec: TensorSpec, *boxes: Box) -> list[Param]:
    """A parameter for each box: inside of it the box, with a column of padding behind where it has columns."""
    params = []
    for number, box in enumerate(boxes):
        sizes = [stop - start for start, stop in box]
        shape = (*sizes[:-1], sizes[-1] + 1) if sizes else ()
        index = tuple(slice(0, n) for n in sizes)
        part = Part(spec.name, spec.shape, box, index)
        params.append(Param(f"{spec.name}.{number}", shape, spec.dtype, (part,)))
    return params


def whole(*specs: TensorSpec) -> list[Param]:
    return [param for spec in specs for param in stored(spec, box_of(spec.shape))]


def mapping_of(
    specs: list[TensorSpec], held: list[list[Param]], wanted: list[list[Param]], bucket: int, **more: int
) -> Mapping:
    values = values_of(specs)
    sources = [StoredRank(params, values) for params in held]
    return Mapping(specs, sources, [StoredDestination(params, values) for params in wanted], bucket, **more)


@pytest.mark.parametrize("room", [32, 48, 64, 80, 160, 176, 1 << 12])
def test_a_weight_of_160_bytes_passes_through_buckets_of_any_size(worlds: Worlds, room: int) -> None:
    spec = TensorSpec("w", (8, 10), BF16)
    bucket = room + CHECKSUM_BYTES
    mapping = mapping_of([spec], [whole(spec)], [whole(spec)], bucket, broadcast_bytes=bucket)
    plan = mapping.analysis.compile(0)
    # Rows of 20 bytes take 32 in a message, but several of one box lie close together.
    assert plan.staging_bytes <= bucket
    assert plan.rounds == {32: 8, 48: 4, 64: 3, 80: 2, 160: 1}.get(room, 1)
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


def test_scalars_empty_weights_and_odd_sizes_travel_beside_each_other(worlds: Worlds) -> None:
    specs = [
        TensorSpec("scalar", (), torch.float32),
        TensorSpec("three", (3,), BF16),
        TensorSpec("nothing", (0, 4), BF16),
        TensorSpec("none of these", (4, 0), torch.float32),
        TensorSpec("one", (1, 1, 1), torch.float16),
        TensorSpec("seven bytes", (7,), torch.uint8),
    ]
    mapping = mapping_of(specs, [whole(*specs)] * 2, [whole(*specs)] * 3, 64 * 8)
    routes = {entry.spec.name: entry.route for entry in mapping.analysis.manifest}
    assert {name for name, route in routes.items() if route == "unused"} == {"nothing", "none of these"}
    assert set(routes.values()) == {"bulk", "unused"}
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_replicas_of_the_source_share_the_sending(worlds: Worlds, replicas: int) -> None:
    specs = [TensorSpec(f"w{i}", (6, 16), BF16) for i in range(12)]
    mapping = mapping_of(specs, [whole(*specs)] * replicas, [whole(*specs)] * 2, 4096)
    # One replica may send each engine rank its half, and they pass it on to each other.
    assert mapping.analysis.pair_bytes.sum() == 2 * 12 * specs[0].nbytes
    sent = mapping.analysis.pair_bytes.sum(axis=1)[:replicas]
    assert sent.max() - sent.min() <= specs[0].nbytes
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


def rows(spec: TensorSpec, start: int, stop: int) -> list[Param]:
    return stored(spec, ((start, stop), *box_of(spec.shape)[1:]))


HELD = TensorSpec("layers.3.w", (8, 4), BF16)
HALVES = [rows(HELD, 0, 3), rows(HELD, 5, 8)]
TWICE = [whole(HELD), stored(HELD, ((0, 5), (0, 4)), ((4, 8), (0, 4)))]


@pytest.mark.parametrize(
    ("held", "wanted", "rank", "boxes"),
    [
        (HALVES, [rows(HELD, 0, 2), whole(HELD)], 3, r"\(\(3, 5\), \(0, 4\)\)"),
        ([whole(HELD)], TWICE, 2, r"\(\(0, 5\), \(0, 4\)\).*\(\(4, 8\), \(0, 4\)\)"),
    ],
    ids=["no trainer holds them", "written twice"],
)
def test_bytes_that_nobody_sends_or_two_write_are_an_error_with_name_rank_and_box(
    held: list[list[Param]], wanted: list[list[Param]], rank: int, boxes: str
) -> None:
    with pytest.raises(PlanError, match=boxes) as raised:
        mapping_of([HELD], held, wanted, 4096)
    assert (raised.value.parameter, raised.value.rank) == ("layers.3.w", rank)
