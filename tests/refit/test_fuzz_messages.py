"""Any bytes at all through everything that reads messages: the right content, or Malformed, and nothing else."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.control import frames
from rlrefit.integration.control.epoch_state import EpochState
from rlrefit.integration.control.frames import Malformed, Op, Role
from rlrefit.integration.control.world import RefitWorld

KEY = b"k" * 32
# The machine may be busy with others.
at_leisure = settings(deadline=None)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@at_leisure
@given(st.binary(max_size=400))
def test_bytes_of_any_kind_are_content_or_malformed(raw: bytes) -> None:
    for read in (frames.unpack_body, frames.unpack_json):
        with contextlib.suppress(Malformed):
            read(raw)
    with contextlib.suppress(Malformed):
        frames.unpack_json(zlib.compress(raw))
    with contextlib.suppress(Malformed):
        frames.parse_header(raw.ljust(frames.HEADER_BYTES)[: frames.HEADER_BYTES], frames.MAX_MESSAGE)
    with contextlib.suppress(Malformed):
        frames.unpack_values(raw)
    with pytest.raises(Malformed):
        frames.check_hello(KEY, b"n" * 16, raw.ljust(frames.HELLO_BYTES)[: frames.HELLO_BYTES])


@at_leisure
@given(st.integers(0, 255), st.lists(st.binary(max_size=50), max_size=8))
def test_a_body_comes_back_as_it_was_packed_and_cut_short_it_does_not(code: int, fields: list[bytes]) -> None:
    packed = frames.pack_body(code, fields)
    assert frames.unpack_body(packed) == (code, fields)
    for end in range(len(packed)):
        with contextlib.suppress(Malformed):
            assert frames.unpack_body(packed[:end]) != (code, fields)


@at_leisure
@given(st.lists(st.lists(st.sampled_from([b"", b"a", b"ab" * 600]) | st.binary(max_size=20), max_size=4)))
def test_what_all_ranks_told_comes_back_by_rank_and_equal_values_travel_once(rows: list[list[bytes]]) -> None:
    packed = frames.pack_values(rows)
    places, table = frames.unpack_values(packed)
    assert [[table[place] for place in row] for row in places] == rows
    assert len(table) == len(set(table)) == len({value for row in rows for value in row})


@at_leisure
@given(PLAIN)
def test_plain_data_comes_back_as_it_was_packed(data: Any) -> None:
    assert frames.unpack_json(frames.pack_json(data)) == data
    padded = [data, "x" * 20_000]  # long enough to be compressed
    assert frames.unpack_json(frames.pack_json(padded)) == padded


def test_json_that_is_nested_without_end_is_malformed_and_no_crash() -> None:
    with pytest.raises(Malformed):
        frames.unpack_json(b"[" * 1_000_000)


@at_leisure
@given(st.integers(0, 1 << 31), st.sampled_from(Role), st.integers(0, frames.HELLO_BYTES * 8 - 1))
def test_an_opening_is_accepted_whole_and_with_any_bit_turned_refused(
    rank: int, role: Role, bit: int
) -> None:
    hello = frames.pack_hello(KEY, b"s" * 16, b"c" * 16, rank, role)
    assert frames.check_hello(KEY, b"s" * 16, hello) == (frames.PROTOCOL_VERSION, b"c" * 16, rank, role)
    turned = bytearray(hello)
    turned[bit // 8] ^= 1 << bit % 8
    for nonce, raw in ((b"s" * 16, bytes(turned)), (b"t" * 16, hello)):
        with pytest.raises(Malformed):
            frames.check_hello(KEY, nonce, raw)


def test_a_frame_is_accepted_once_in_its_place_and_in_its_direction() -> None:
    def signer(direction: bytes) -> frames.Signer:
        return frames.Signer(KEY, direction, b"s" * 16, b"c" * 16)

    sender = signer(b"to server")
    first, second = sender.frame(frames.Body(b"one")), sender.frame(frames.Body(b"two"))

    def check(receiver: frames.Signer, frame: bytes) -> None:
        receiver.check(
            frames.parse_header(frame[: frames.HEADER_BYTES], frames.MAX_MESSAGE)[1],
            frames.Body(frame[frames.HEADER_BYTES :]),
        )

    receiver = signer(b"to server")
    check(receiver, first)
    check(receiver, second)
    again = signer(b"to server")
    check(again, first)
    for other, frame in ((signer(b"to server"), second), (again, first), (signer(b"to client"), first)):
        with pytest.raises(Malformed, match="signature"):
            check(other, frame)


@at_leisure
@given(
    st.binary(max_size=64) | st.integers(0, 2000).map(bytes),
    st.integers(0, 3000),
    st.binary(min_size=1, max_size=3),
)
def test_no_other_body_passes_with_the_signature_of_a_short_or_a_long_one(
    raw: bytes, place: int, other: bytes
) -> None:
    def signer() -> frames.Signer:
        return frames.Signer(KEY, b"to server", b"s" * 16, b"c" * 16)

    body = frames.Body(raw)
    signature = signer().frame(body)[frames.HEADER_BYTES - 16 : frames.HEADER_BYTES]
    signer().check(signature, body)
    at = place % (len(raw) + 1)
    for changed in (raw[:at] + other + raw[at:], raw[:at] + raw[at + 1 :], body.digest):
        if changed != raw:
            with pytest.raises(Malformed, match="signature"):
                signer().check(signature, frames.Body(changed))


@at_leisure
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([*Op, 0, 99]),
            st.lists(
                st.sampled_from(
                    [
                        b"",
                        b"a",
                        b"b",
                        b"\1",
                        b"1",
                        frames.pack_int(0),
                        frames.pack_int(-5),
                        frames.pack_int(2**63 - 1),
                    ]
                )
                | st.binary(max_size=12),
                max_size=6,
            ),
        ),
        max_size=40,
    )
)
def test_requests_in_any_order_are_answered_once_each_or_malformed(
    requests: list[tuple[int, int, list[bytes]]],
) -> None:
    state = EpochState(RefitWorld(0, 2, 2))
    owed: dict[int, int] = {}
    for now, (rank, code, fields) in enumerate(requests):
        if owed.get(rank):
            continue  # a caller has one request at a time
        owed[rank] = 1
        try:
            answers = state.request(rank, rank, code, fields, float(now))
        except Malformed:
            state.forget(rank)
            owed[rank] = 0
            continue
        for caller, body in [*answers, *state.expire(float(now))]:
            assert isinstance(caller, int)
            frames.unpack_body(body)
            owed[caller] -= 1
            assert owed[caller] == 0, "an answer that nobody waits for would be read as the next one's"
    # The time of waits, and then that of doubts.
    for caller, _ in [*state.expire(1e30), *state.expire(2e30)]:
        owed[caller] -= 1  # type: ignore[index]
    assert not any(owed.values()), "somebody would wait for ever"
