"""The order of packing, wire and unpacking on streams, checked with lines that only note what waits for what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.comm.group import PeerBuffer
from rlrefit.integration.layout import Fragment
from rlrefit.integration.plan import GLOO_PACE, NCCL_PACE, Message, Plan, Segment
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport import P2PTransport, p2p

TRAINER, SELF, GIVER, TAKER = range(4)


@dataclass
class Work:
    """What has been begun: each piece of work with all that is sure to have ended before it."""

    refit: int = 0
    before: list[set[int]] = field(default_factory=list)
    reads: dict[int, list[int]] = field(default_factory=dict)
    writes: dict[int, list[int]] = field(default_factory=dict)
    current: Any = None

    def touch(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Work on the current line that touches buckets; all that it must not race with has to be before it."""
        number = len(self.before)
        self.before.append(set(self.current.done))
        for bucket in reads:
            assert {*self.writes.get(bucket, [])} <= self.before[number]
            self.reads.setdefault(bucket, []).append(number)
        for bucket in writes:
            assert {*self.writes.get(bucket, []), *self.reads.get(bucket, [])} <= self.before[number]
            self.writes.setdefault(bucket, []).append(number)
        self.current.done.add(number)


class FakeSpan:
    """A span that knows in which refit it was last recorded."""

    def __init__(self) -> None:
        self.refit, self.done = 0, set[int]()

    def query(self) -> bool:
        return True


class FakeLine:
    """A line of :class:`Work`; a new refit begins when everything before has ended."""

    def __init__(self, work: Work):
        self._work = work
        self.done = set[int]()

    def enter(self) -> None:
        self._work.current = self

    def begin(self) -> None:
        self.done = set(range(len(self._work.before)))

    def after(self, span: FakeSpan) -> None:
        assert span.refit == self._work.refit, "waits on what an earlier refit recorded"
        self.done |= span.done

    def after_line(self, line: FakeLine) -> None:
        self.done |= line.done

    @contextmanager
    def timed(self, clock: StageClock, stage: str, span: FakeSpan, rest: Any = None) -> Any:
        yield
        span.refit, span.done = self._work.refit, set(self.done)


class FakeGroup:
    """A group whose exchanges only touch their buffers."""

    device = torch.device("cpu")

    def __init__(self, work: Work, lanes: int):
        self.lanes = lanes
        self._work = work

    def connect(self, peers: Any) -> None:
        pass

    def wait_for(self, spans: Sequence[FakeSpan], stage: str) -> None:
        assert all(span.refit == self._work.refit for span in spans)

    def prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], lane: int = 0) -> Any:
        touched, written = (
            {p.buffer.untyped_storage().data_ptr() for p in parcels} for parcels in (sends, receives)
        )
        return SimpleNamespace(start=lambda stage: self._work.touch(touched, written), finish=None)


def _message(place: int, number: int, source: int, destination: int, part: int) -> Message:
    start = 4 * (3 * place + part)
    segment = Segment("w", ((start, start + 4),), 0, 16)
    return Message(source, destination, number, (segment,), 32, source)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A rank that sends, receives and passes on in rounds of any numbers."""
    sends: list[tuple[Message, ...]] = []
    receives: list[tuple[Message, ...]] = []
    arrived: list[Message] = []
    number = 0
    for place in range(draw(st.integers(1, 14))):
        number += draw(st.sampled_from([1, 2, 3, 6, 8, 14]))
        message = partial(_message, place, number)
        out = [message(SELF, TAKER, 0)] if draw(st.booleans()) else []
        if arrived and draw(st.booleans()):
            again = draw(st.sampled_from(arrived))
            out.append(replace(again, source=SELF, destination=TAKER, round_index=number))
        inside = [message(TRAINER, SELF, 1)] if draw(st.booleans()) or not out else []
        if draw(st.booleans()):
            inside.append(replace(message(GIVER, SELF, 2), origin=TRAINER))
        arrived += [m for m in inside if not m.is_relay]
        sends.append(tuple(out))
        receives.append(tuple(inside))
    pace = draw(st.sampled_from([NCCL_PACE, GLOO_PACE]))
    return Plan(SELF, tuple(sends), tuple(receives), "", {}, pace)


@given(plans(), st.integers(1, 4), st.sampled_from(["off", "full"]))
@settings(max_examples=150, deadline=None)
def test_what_shares_a_bucket_is_in_order_and_nothing_waits_on_an_earlier_refit(
    plan: Plan, lanes: int, verify: str
) -> None:
    work = Work()
    with (
        patch.object(p2p, "make_line", lambda device: FakeLine(work)),
        patch.object(p2p, "make_span", lambda device: FakeSpan()),
    ):
        transport = P2PTransport(FakeGroup(work, lanes), SELF, plan, verify)  # type: ignore[arg-type]
    size = 4 * 3 * len(plan.sends)
    transport.bind([Fragment("w", (size,), ((0, size),), torch.zeros(size))])
    relays = sum(m.is_relay for messages in plan.receives for m in messages)
    said = {"turns": {str(SELF): [[0, 1]] * relays}}
    transport.connect([said] * 4)
    replay: Any = transport._replay

    def bucket(direction: str, index: int) -> list[int]:
        staging = replay.outgoing if direction == "out" else replay.incoming
        number = staging.bucket_of[index]
        return [replay.buckets[direction, number].untyped_storage().data_ptr()] if number >= 0 else []

    replay.pack = lambda index, refit: work.touch([], bucket("out", index))
    replay.unpack = lambda index, refit: work.touch(bucket("in", index), [])
    # Nothing is packed here, so rows of checksums stay what they are.
    replay.ledger.damaged = list
    begun: list[int] = []
    aside: list[list[int]] = []
    replay.exchanges = [_noted(exchange, i, begun) for i, exchange in enumerate(replay.exchanges)]
    for work.refit in (1, 2):
        begun.clear()
        transport.run(StageClock(torch.device("cpu")), lambda: aside.append([*begun]))
    # Aside comes in the same place of every rank's order of rounds, which the numbers of the rounds tell.
    numbers = [next(chain(*both)).round_index for both in zip(plan.sends, plan.receives, strict=True)]
    first = [index for index, number in enumerate(numbers) if number < p2p._ASIDE_BEFORE]
    assert aside == [first, first]
    assert begun == [*range(len(numbers))]


def _noted(exchange: Any, index: int, begun: list[int]) -> Any:
    def start(stage: str) -> None:
        exchange.start(stage)
        begun.append(index)

    return SimpleNamespace(start=start, finish=None)
