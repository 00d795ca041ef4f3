"""Odd sizes, dtypes and shares of weights, bit for bit; and plans that must not be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlrefit.integration.errors import PlanError
from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.plan import CHECKSUM_BYTES, LARGE_SEGMENT
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.plan.catalog import Param, Part

from .mappings import Mapping, Worlds, wrong_refits

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


def rows(spec: TensorSpec, start: int, stop: int) -> list[Param]:
    return stored(spec, ((start, stop), *box_of(spec.shape)[1:]))


@pytest.mark.parametrize("room", [32, 48, 64, 80, 160, 176, 1 << 12])
def test_a_weight_of_160_bytes_passes_through_buckets_of_any_size(worlds: Worlds, room: int) -> None:
    spec = TensorSpec("w", (8, 10), BF16)
    mapping = Mapping(
        [spec],
        [whole(spec)],
        [whole(spec)],
        room + CHECKSUM_BYTES,
        broadcast_bytes=room + CHECKSUM_BYTES,
    )
    plan = mapping.analysis.compile(0)
    # Rows of 20 bytes take 32 in a message, but several of one box lie close together.
    assert plan.staging_bytes <= room + CHECKSUM_BYTES
    assert plan.rounds == {32: 8, 48: 4, 64: 3, 80: 2, 160: 1}.get(room, 1)
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


@pytest.mark.parametrize("count", [7, 8, 9])
def test_messages_end_where_the_bucket_ends(worlds: Worlds, count: int) -> None:
    specs = [TensorSpec(f"w{i}", (8,), BF16) for i in range(count)]
    mapping = Mapping(specs, [whole(*specs)], [whole(*specs)], 8 * 16 + CHECKSUM_BYTES)
    plan = mapping.analysis.compile(1)
    assert [len(messages[0].segments) for messages in plan.receives] == {7: [7], 8: [8], 9: [8, 1]}[count]
    assert wrong_refits(worlds, mapping, BOTH, (1, 2)) == []


def test_scalars_empty_weights_and_odd_sizes_travel_beside_each_other(worlds: Worlds) -> None:
    specs = [
        TensorSpec("scalar", (), torch.float32),
        TensorSpec("three", (3,), BF16),
        TensorSpec("nothing", (0, 4), BF16),
        TensorSpec("none of these", (4, 0), torch.float32),
        TensorSpec("one", (1, 1, 1), torch.float16),
        TensorSpec("seven bytes", (7,), torch.uint8),
    ]
    mapping = Mapping(specs, [whole(*specs)] * 2, [whole(*specs)] * 3, 64 * 8)
    routes = {entry.spec.name: entry.route for entry in mapping.analysis.manifest}
    assert {name for name, route in routes.items() if route == "unused"} == {"nothing", "none of these"}
    assert set(routes.values()) == {"bulk", "unused"}
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, BF16, torch.float64, torch.int64],
)
def test_bytes_of_every_dtype_arrive_as_they_left(worlds: Worlds, dtype: torch.dtype) -> None:
    specs = [TensorSpec("other", (3, 5), BF16), TensorSpec("w", (5, 3), dtype)]
    held = [rows(specs[0], 0, 3) + rows(specs[1], 0, 2), rows(specs[1], 2, 5)]
    wanted = [stored(specs[1], ((0, 5), (0, 1))), stored(specs[1], ((0, 5), (1, 3))) + whole(specs[0])]
    mapping = Mapping(specs, held, wanted, 1 << 10)
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_replicas_of_the_source_share_the_sending(worlds: Worlds, replicas: int) -> None:
    specs = [TensorSpec(f"w{i}", (6, 16), BF16) for i in range(12)]
    mapping = Mapping(specs, [whole(*specs)] * replicas, [whole(*specs)] * 2, 4096)
    # One replica may send each engine rank its half, and they pass it on to each other.
    assert mapping.analysis.pair_bytes.sum() == 2 * 12 * specs[0].nbytes
    sent = mapping.analysis.pair_bytes.sum(axis=1)[:replicas]
    assert sent.max() - sent.min() <= specs[0].nbytes
    assert wrong_refits(worlds, mapping, BOTH, (1, 2, 3)) == []


def test_a_rank_without_any_part_and_one_without_wishes_take_part(worlds: Worlds) -> None:
    spec = TensorSpec("w", (4, 3), BF16)
    mapping = Mapping([spec], [[], whole(spec)], [[], rows(spec, 1, 4)], 256)
    assert (mapping.analysis.compile(0).rounds, mapping.analysis.compile(2).rounds) == (0, 0)
    assert wrong_refits(worlds, mapping, BOTH, (1, 2)) == []


def test_a_part_that_no_trainer_holds_is_an_error_with_name_rank_and_box() -> None:
    spec = TensorSpec("layers.3.w", (8, 4), BF16)
    with pytest.raises(PlanError, match=r"\(\(3, 5\), \(0, 4\)\)") as raised:
        Mapping([spec], [rows(spec, 0, 3), rows(spec, 5, 8)], [rows(spec, 0, 2), whole(spec)], 4096)
    assert (raised.value.parameter, raised.value.rank) == ("layers.3.w", 3)


def test_bytes_that_would_be_written_twice_are_an_error_with_name_rank_and_box() -> None:
    spec = TensorSpec("layers.3.w", (8, 4), BF16)
    twice = stored(spec, ((0, 5), (0, 4)), ((4, 8), (0, 4)))
    with pytest.raises(PlanError, match=r"\(\(0, 5\), \(0, 4\)\).*\(\(4, 8\), \(0, 4\)\)") as raised:
        Mapping([spec], [whole(spec)], [whole(spec), twice], 4096)
    assert (raised.value.parameter, raised.value.rank) == ("layers.3.w", 2)


def test_a_bucket_without_room_for_one_element_is_an_error() -> None:
    spec = TensorSpec("w", (8, 4), BF16)
    with pytest.raises(PlanError, match="bucket"):
        Mapping([spec], [whole(spec)] * 4, [whole(spec)] * 4, 64)


def test_a_large_contiguous_weight_travels_from_parameter_to_parameter(worlds: Worlds) -> None:
    spec = TensorSpec("w", (LARGE_SEGMENT // 1024 + 1, 512), BF16)
    part = Part(spec.name, spec.shape, box_of(spec.shape), (slice(None), slice(None)))
    plain = [Param("w", spec.shape, BF16, (part,))]
    mapping = Mapping([spec], [plain], [plain], 2 * LARGE_SEGMENT)
    assert mapping.analysis.compile(0).rounds == 1
    assert wrong_refits(worlds, mapping, ("p2p",), (1, 2)) == []
