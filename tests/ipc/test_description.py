"""What ranks tell of their memory: read back as it was, and never trusted."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import RefitMismatch
from rlrefit.integration.gpu_memory.description import (
    Allocation,
    Description,
    Encoded,
    Place,
    Shared,
    View,
)
from rlrefit.integration.packing import Strided

ALLOCATIONS = Allocation(1 << 40, 4096, "ab" * 64), Allocation(3 << 40, 6144, "", (2048, 4096))
FIRST = View(Place(0, 64), (32, 2), 2), View(Place(1, 0), (), 4)
ENCODED = View(Place(0, 128), (32, 4), 4, Encoded(0, (16, 8), ((2, 4), (0, 8))))
SCALED = View(Place(0, 128), (32, 4), 4, Encoded(0, (16, 8), ((2, 4), (0, 8)), Place(1, 8)))
SHARED = {
    0: Shared(FIRST, Place(1, 5000), Place(1, 6000)),
    3: Shared((View(Place(0, 128), (32, 2), 2), ENCODED, SCALED), Place(1, 5100), Place(1, 6008)),
}
DESCRIPTION = Description(
    "process", "GPU-1", 60.5, ALLOCATIONS, "somewhere", "00ff", SHARED, "it sleeps", ({"kind": "any"},)
)


def test_a_description_survives_json() -> None:
    assert Description.from_json(json.loads(json.dumps(DESCRIPTION.to_json())), 2) == DESCRIPTION


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("allocations"),
        lambda d: d.update(allocations={}),
        lambda d: d["allocations"][0].__setitem__("handle", "ab"),
        lambda d: d["allocations"][0].__setitem__("handle", "zz" * 64),
        lambda d: d["allocations"][0].__setitem__("size", -1),
        lambda d: d["allocations"][0].__setitem__("size", 1 << 60),
        lambda d: d["allocations"][0].__setitem__("chunks", [4096]),
        lambda d: d["allocations"][1].__setitem__("chunks", [2048]),
        lambda d: d["allocations"][1].__setitem__("chunks", [6144, 0]),
        lambda d: d["layouts"][0].__setitem__(0, 3),
        lambda d: d["layouts"][0].__setitem__(1, -32),
        lambda d: d["layouts"][0].extend([1] * 9),
        lambda d: d["shared"]["0"]["offset"].__setitem__(0, 4096),
        lambda d: d["shared"]["0"]["offset"].__setitem__(0, True),
        lambda d: d["shared"]["0"]["offset"].append(0),
        lambda d: d["shared"]["0"]["allocation"].__setitem__(0, 2),
        lambda d: d["shared"]["0"]["layout"].__setitem__(0, -1),
        lambda d: d["shared"]["0"].update(signal={"allocation": 1, "offset": 6144}),
        lambda d: d["shared"].update(x={}),
        lambda d: d["shared"]["3"]["encoded"]["1"].__setitem__(0, 1),
        lambda d: d["shared"]["3"]["encoded"]["1"].__setitem__(3, -1),
        lambda d: d["shared"]["3"]["encoded"]["1"].append(0),
        lambda d: d["shared"]["3"]["encoded"]["2"].__setitem__(7, 2),
        lambda d: d["shared"]["3"]["encoded"]["2"].__setitem__(8, 6144),
        lambda d: d.update(pulls="why " * 2000),
        lambda d: d.update(encodings={}),
        lambda d: d.update(token="no hex"),
        lambda d: d.update(address="a" * 1000),
        lambda d: d.update(process=7),
        lambda d: d.pop("timeout_s"),
        lambda d: d.update(timeout_s=0),
        lambda d: d.update(timeout_s=True),
        lambda d: d.update(timeout_s="60"),
        lambda d: d.update(timeout_s=float("nan")),
        lambda d: d.update(timeout_s=float("inf")),
    ],
)
def test_a_description_that_is_malformed_is_refused(change: Any) -> None:
    data = json.loads(json.dumps(DESCRIPTION.to_json()))
    change(data)
    with pytest.raises(RefitMismatch, match="refit rank 2"):
        Description.from_json(data, 2)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    ),
    st.sampled_from([None, *DESCRIPTION.to_json()]),
)
@settings(max_examples=100, deadline=None)
def test_whatever_a_peer_says_reading_it_ends_in_a_description_or_the_one_error(
    noise: Any, key: str | None
) -> None:
    data = noise if key is None else {**DESCRIPTION.to_json(), key: noise}
    with contextlib.suppress(RefitMismatch):
        assert isinstance(Description.from_json(data, 2), Description)


def test_a_view_becomes_memory_at_the_address_where_its_allocation_is_mapped() -> None:
    view = View(Place(1, 96), (32, 2), 2)
    assert DESCRIPTION.memory(view, (3, 4), [100_000, 200_000]) == Strided(200_096, (3, 4), (32, 2), 2)


def test_a_view_may_fill_its_allocation_to_the_last_byte_and_not_one_more() -> None:
    fits = View(Place(0, 4096 - 70), (32, 2), 2)
    assert DESCRIPTION.memory(fits, (3, 3), [0, 0]).extent == 70
    with pytest.raises(ValueError, match="reaches out"):
        DESCRIPTION.memory(View(Place(0, 4096 - 69), (32, 2), 2), (3, 3), [0, 0])
    with pytest.raises(ValueError, match="strides"):
        DESCRIPTION.memory(fits, (3,), [0, 0])
    with pytest.raises(ValueError, match="several elements at one place"):
        DESCRIPTION.memory(View(Place(0, 0), (0, 2), 2), (3, 3), [0, 0])
    assert DESCRIPTION.memory(View(Place(0, 0), (0, 2), 2), (1, 3), [0, 0]).shape == (1, 3)
    assert DESCRIPTION.region(Place(1, 6136), 8, [0, 1000]) == 7136
    with pytest.raises(ValueError, match="reaches out"):
        DESCRIPTION.region(Place(1, 6137), 8, [0, 0])
