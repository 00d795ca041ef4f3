"""The order of packing, wire and unpacking on streams, checked with streams that only note what waits for what."""

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
        """Work on the current stream that touches buckets; all that it must not race with has to be before it."""
        number = len(self.before)
        self.before.append(set(self.current.done))
        for bucket in reads:
            assert {*self.writes.get(bucket, [])} <= self.before[number]
            self.reads.setdefault(bucket, []).append(number)
        for bucket in writes:
            assert {*self.writes.get(bucket, []), *self.reads.get(bucket, [])} <= self.before[number]
            self.writes.setdefault(bucket, []).append(number)
        self.current.done.add(number)


class FakeEvent:
    """A event that knows in which refit it was last recorded."""

    def __init__(self) -> None:
        self.refit, self.done = 0, set[int]()

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream of :class:`Work`; a new refit begins when everything before has ended."""

    def __init__(self, work: Work):
        self._work = work
        self.done = set[int]()

    def enter(self) -> None:
        self._work.current = self

    def wait_caller(self) -> None:
        self.done = set(range(len(self._work.before)))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.refit == self._work.refit, "waits on what an earlier refit recorded"
        self.done |= event.done

    def wait_stream(self, stream: FakeStream) -> None:
        self.done |= stream.done

    @contextmanager
    def timed(self, clock: StageClock, stage: str, event: FakeEvent, finish: Any = None) -> Any:
        yield
        event.refit, event.done = self._work.refit, set(self.done)


class FakeGroup:
    """A group whose exchanges only touch their buffers."""

    device = torch.device("cpu")

    def __init__(self, work: Work, lanes: int):
        self.lanes = lanes
        self._work = work

    def connect(self, peers: Any) -> None:
        pass

    def wait_for(self, events: Sequence[FakeEvent], stage: str) -> None:
        assert all(event.refit == self._work.refit for event in events)

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
        patch.object(p2p, "make_stream", lambda device: FakeStream(work)),
        patch.object(p2p, "make_event", lambda device: FakeEvent()),
    ):
        transport = P2PTransport(FakeGroup(work, lanes), SELF, plan, verify)  # type: ignore[arg-type]
    size = 4 * 3 * len(plan.sends)
    transport.bind([Fragment("w", (size,), ((0, size),), torch.zeros(size))])
    relays = sum(m.is_relay for messages in plan.receives for m in messages)
    said = {"turns": {str(SELF): [[0, 1]] * relays}}
    transport.connect([said] * 4)
    bound: Any = transport._bound

    def bucket(direction: str, index: int) -> list[int]:
        sharing = bound.outgoing if direction == "out" else bound.incoming
        number = sharing.bucket_of[index]
        return [bound.buckets[direction, number].untyped_storage().data_ptr()] if number >= 0 else []

    bound.pack = lambda index, refit: work.touch([], bucket("out", index))
    bound.unpack = lambda index, refit: work.touch(bucket("in", index), [])
    # Nothing is packed here, so rows of checksums stay what they are.
    bound.checksums.damaged = list
    begun: list[int] = []
    meanwhile: list[list[int]] = []
    for i, one in enumerate(bound.rounds):
        one.exchange.start = partial(_begin, one.exchange.start, begun, i)
    for work.refit in (1, 2):
        begun.clear()
        transport.run(StageClock(torch.device("cpu")), lambda: meanwhile.append([*begun]))
    # What is done meanwhile comes in the same place of every rank's order of rounds, which the numbers of the rounds tell.
    numbers = [next(chain(*both)).round_index for both in zip(plan.sends, plan.receives, strict=True)]
    first = [index for index, number in enumerate(numbers) if number < p2p._MEANWHILE_BEFORE]
    assert meanwhile == [first, first]
    assert begun == [*range(len(numbers))]


def _begin(start: Any, begun: list[int], index: int, stage: str) -> None:
    start(stage)
    begun.append(index)
