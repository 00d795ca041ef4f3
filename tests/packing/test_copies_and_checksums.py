"""Copies and checksums of strided views: tables against torch's own indexing, on random geometry."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.packing import ChecksumViews, CopyTable, Strided, checksum, make_checksums, make_copy
from rlrefit.integration.packing.rows import COLUMNS, WIDEST, Table, build_tables, collapse

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finalizer in Python's own integers."""
    x = x * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def checksum_by_definition(message: bytes) -> list[int]:
    words = [int.from_bytes(message[i : i + 4], "little") for i in range(0, len(message), 4)]
    sums = [sum(w * mix(2 * i + j) for i, w in enumerate(words)) & MASK for j in (0, 1)]
    return [s - (1 << 64) if s >> 63 else s for s in sums]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of up to four dimensions with steps, offsets, transposed and expanded in places, of distinct bytes."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    margins = [draw(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))) for _ in shape]
    full = [a + n * step + b for n, (a, b, step) in zip(shape, margins, strict=True)]
    count = int(torch.tensor(full).prod()) * dtype.itemsize if full else dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    storage = raw.view(dtype).view(full)
    for dim, (n, (a, _, step)) in enumerate(zip(shape, margins, strict=True)):
        storage = storage.narrow(dim, a, n * step)[(slice(None),) * dim + (slice(None, None, step),)]
    return storage.permute(draw(st.permutations(range(len(shape)))))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def walk(table: Table) -> dict[int, int]:
    """What the kernel does with a table, unit by unit: byte place on side b → byte of side a."""
    moved = {}
    for tile, row_index in enumerate(table.tiles.tolist()):
        a, b, count, run, rows, oa, ra, ob, rb, first, _ = table.rows[row_index].tolist()
        for index in range((tile - first) * 4, min((tile - first + 1) * 4, count)):
            line, column = divmod(index, run)
            outer, line = divmod(line, rows)
            for byte in range(table.unit):
                at = a + (outer * oa + line * ra + column) * table.unit + byte
                to = b + (outer * ob + line * rb + column) * table.unit + byte
                assert to not in moved, "written twice"
                moved[to] = at
    return moved


@given(views(), st.integers(0, 40), st.sampled_from([1, 40, 1 << 20]))
@settings(max_examples=120, deadline=None)
def test_a_table_pairs_every_byte_of_the_source_with_its_byte_of_the_destination(
    source: torch.Tensor, address: int, most: int
) -> None:
    a = Strided.of(source)
    for b in (Strided.packed(1 << 20 | address, source.shape, a.itemsize), Strided.of(source.clone())):
        tables = build_tables(collapse([(a, b, 0)], most), tile_units=4)
        moved: dict[int, int] = {}
        for table in tables:
            assert all(table.rows[:, 2] * table.unit <= max(most, WIDEST))
            assert table.rows.shape[1] == COLUMNS
            assert all(int(v) % table.unit == 0 for v in table.rows[:, :2].ravel())
            moved |= walk(table)
        expected = {}
        for index in product(*map(range, source.shape)):
            for byte in range(a.itemsize):
                at = a.address + sum(i * s for i, s in zip(index, a.strides, strict=True)) + byte
                expected[b.address + sum(i * s for i, s in zip(index, b.strides, strict=True)) + byte] = at
        assert moved == expected
        assert sum(t.nbytes for t in tables) == a.nbytes


@given(st.lists(views(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_live_views_add_up_to_the_checksum_of_their_packed_message(held: list[torch.Tensor]) -> None:
    offsets = []
    end = 0
    for view in held:
        offsets.append(end)
        end += -(-view.nbytes // 16) * 16
    message = torch.zeros(end, dtype=torch.uint8)
    for view, offset in zip(held, offsets, strict=True):
        message[offset : offset + view.nbytes] = raw_bytes(view)
    out = torch.full((2,), 77, dtype=torch.int64)
    make_checksums(list(zip(held, offsets, strict=True)), CPU).compute(out)
    assert out.tolist() == checksum(message).tolist() == checksum_by_definition(bytes(message.numpy()))


def test_a_checksum_goes_on_beyond_the_block_in_which_its_weights_are_made() -> None:
    message = torch.randint(0, 256, (600_000,), dtype=torch.uint8)
    out = torch.zeros(2, 2, dtype=torch.int64)
    halves = [(message[:400_000], 0), (message[400_000:], 400_000)]
    ChecksumViews(halves, slots=[1, 1]).add_to(out)
    assert out[1].tolist() == checksum(message).tolist() == checksum_by_definition(bytes(message.numpy()))
    assert out[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("places", "others", "flip"),
    [([3, 90], [90, 3], 0), ([3], [3], 0x01010101), ([*range(100)], [*range(1, 100), 0], 0)],
    ids=["two words change places", "bits flip", "all move"],
)
def test_bytes_that_change_or_move_change_both_sums(places: list[int], others: list[int], flip: int) -> None:
    message = torch.randint(0, 256, (400,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words, other = message.view(torch.int32), message.clone()
    other.view(torch.int32)[places] = words[others] ^ flip
    assert (checksum(message) != checksum(other)).all()


@given(views())
@settings(max_examples=60, deadline=None)
def test_copies_land_in_strided_storage_and_touch_nothing_else(source: torch.Tensor) -> None:
    around = torch.full([n + 2 for n in source.shape], 7, dtype=source.dtype)
    inside = tuple(slice(1, n + 1) for n in source.shape)
    expected = around.clone()
    expected[inside] = source
    make_copy([(source, around[inside])], CPU).launch()
    assert torch.equal(raw_bytes(around), raw_bytes(expected))


def test_tensors_that_differ_are_not_copied_as_bytes() -> None:
    with pytest.raises(ValueError, match="as bytes"):
        make_copy([(torch.zeros(4), torch.zeros(2, 2))], CPU)
    with pytest.raises(ValueError, match="wrong place"):
        collapse([(Strided.flat(0, 8), Strided.flat(0, 9), 0)])


@given(st.lists(st.tuples(views(), st.integers(0, 9)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_rows_of_many_pairs_are_those_of_each_pair_one_after_another(
    held: list[tuple[torch.Tensor, int]],
) -> None:
    pairs = [
        (Strided.of(view), Strided.packed(1 << 30, view.shape, view.element_size()), slot)
        for view, slot in held
    ]
    alone = [row for pair in pairs for row in collapse([pair], 64).tolist()]
    assert collapse(pairs, 64).tolist() == alone
    assert {row[9] for row in alone} <= {slot for _, slot in held}


def test_a_slice_of_memory_is_the_memory_of_the_slice() -> None:
    tensor = torch.zeros(5, 6, 7)[:, ::2].permute(2, 0, 1)
    assert Strided.of(tensor).slice(((1, 4), (0, 5), (2, 3))) == Strided.of(tensor[1:4, 0:5, 2:3])
    assert Strided.of(torch.zeros(3, 1, 4)).contiguous
    assert not Strided.of(torch.zeros(3, 4)[:, :2]).contiguous
    with pytest.raises(ValueError, match="other memory"):
        Strided.of(tensor).slice(((1, 8), (0, 5), (2, 3)))


def test_memory_of_more_bytes_than_a_row_may_have_is_split() -> None:
    wide = Strided.flat(1 << 40, 3 << 30), Strided.flat(0, 3 << 30), 0
    tall = (
        Strided(1 << 41, (40_000, 40_000), (160_000, 2), 2),
        Strided.packed(1 << 42, (40_000, 40_000), 2),
        0,
    )
    tables = build_tables(collapse([wide, tall]), 1 << 20)
    assert sum(t.nbytes for t in tables) == wide[0].nbytes + tall[0].nbytes
    assert all((t.rows[:, 2] * t.unit < 1 << 30).all() for t in tables)


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t.imag])
def test_a_view_that_has_other_values_than_its_memory_is_refused(
    part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    lazy = part(torch.ones(2, 3, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="lazy"):
        Strided.of(lazy)
    assert Strided.of(lazy.resolve_conj().resolve_neg()).nbytes == lazy.nbytes


def test_an_expanded_destination_is_refused_and_an_expanded_source_is_not_its_concern() -> None:
    expanded, whole = Strided.of(torch.zeros(1, 4).expand(3, 4)), Strided.of(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="share one place"):
        CopyTable.build([(whole, expanded)], CPU)
    assert expanded.repeats
    assert not whole.repeats
    assert not Strided.of(torch.zeros(1, 4).expand(1, 4)).repeats
