"""Dataclasses that are read from what another rank sent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.control.decoding import decode
from rlrefit.integration.control.frames import Malformed


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("the name is empty")


@dataclass(frozen=True)
class Outer:
    rank: int
    seconds: float
    on: bool
    pair: tuple[int, str]
    inner: Inner
    by_rank: Mapping[int, Inner]
    by_name: dict[str, list[int]]
    several: list[Inner]
    maybe: int | None
    raw: bytes = b""
    note: str = field(default="")


OUTER = Outer(
    3, 1.5, True, (4, "x"), Inner("a", (1, 2)), {7: Inner("b")}, {"k": [1]}, [Inner("c")], None, b"", "n"
)


def plain(**changed: Any) -> dict[str, Any]:
    data = asdict(OUTER) | {"raw": ""}
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read | changed


def test_a_dataclass_survives_json_with_all_that_is_in_it() -> None:
    assert decode(Outer, plain()) == OUTER
    assert decode(Outer, plain(raw="00ff", maybe=5)).raw == b"\x00\xff"
    assert decode(Outer, plain(seconds=2)).seconds == 2.0
    defaults = {key: value for key, value in plain().items() if key not in ("raw", "note")}
    assert decode(Outer, defaults).note == ""


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"rank": True}, "rank"),
        ({"rank": 1.0}, "rank"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": False}, "seconds"),
        ({"on": 1}, "on"),
        ({"pair": [1]}, "pair"),
        ({"pair": [1, 2]}, "pair[1]"),
        ({"inner": {"name": "a", "sizes": [1, "2"]}}, "inner.sizes[1]"),
        ({"inner": {"name": ""}}, "inner"),
        ({"inner": {"name": "a", "other": 1}}, "other"),
        ({"inner": None}, "inner"),
        ({"by_rank": {"x": {"name": "a"}}}, "by_rank"),
        ({"by_rank": {"-1": {"name": "a"}}}, "by_rank"),
        ({"by_name": {"k": {}}}, "by_name[k]"),
        ({"several": [{"name": 1}]}, "several[0].name"),
        ({"maybe": "5"}, "maybe"),
        ({"raw": "zz"}, "raw"),
        ({"unknown": 1}, "unknown"),
        ({}, "rank"),  # which is missing
    ],
)
def test_what_is_malformed_is_refused_by_its_field(changed: dict[str, Any], path: str) -> None:
    data = plain(**changed) if changed else {key: value for key, value in plain().items() if key != path}
    with pytest.raises(Malformed) as raised:
        decode(Outer, data)
    assert path in str(raised.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    ),
    st.sampled_from([None, *plain()]),
)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_reading_it_ends_in_a_value_or_the_one_error(noise: Any, key: str | None) -> None:
    with contextlib.suppress(Malformed):
        assert isinstance(decode(Outer, noise if key is None else plain(**{key: noise})), Outer)
