"""What the rendezvous knows and whom it still owes an answer: plain logic, without sockets or clocks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..world import RefitWorld
from .wire import Malformed, Op, Status, pack_body, pack_int, unpack_int

# Whom an answer is for: whatever the server knows connections by.
Caller = Hashable
Answer = tuple[Caller, bytes]
_OK = pack_body(Status.OK)


@dataclass(frozen=True)
class _Wait:
    """A caller that waits for keys; with ``reads`` it gets the first one's value."""

    keys: tuple[bytes, ...]
    deadline: float
    reads: bool


@dataclass
class _Meeting:
    """A barrier in progress: what each rank that has arrived brought."""

    compare: bool
    deadline: float
    seconds: float
    arrived: dict[int, tuple[Caller, bool, bytes]] = field(default_factory=dict)


class Ledger:
    """Values, meetings and aborts of one epoch.

    Each call takes what happened and returns the answers that are due. A caller has one request at a time.
    Once a rank has given up, or was lost, every wait is answered with that.

    Args:
        world: of trainer rank 0; for the number of ranks and their names.
    """

    def __init__(self, world: RefitWorld):
        self._world = world
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[Caller, _Wait] = {}
        self._meetings: dict[bytes, _Meeting] = {}
        self._abort: bytes | None = None
        self._left: set[int] = set()
        self.next_deadline = float("inf")

    @property
    def entries(self) -> int:
        """Values, waits and meetings that are held; flat over any number of refits."""
        return len(self._values) + len(self._waits) + len(self._meetings)

    def request(self, caller: Caller, rank: int, code: int, fields: list[bytes], now: float) -> list[Answer]:
        """A request of ``rank``.

        Raises:
            Malformed: no rank of this version would ask that.
        """
        match code, fields:
            case Op.MEET, [topic, milliseconds, compare, flag, value]:
                deadline = now + unpack_int(milliseconds) / 1e3
                return self._meet(caller, rank, topic, now, deadline, compare == b"\1", flag == b"\1", value)
            case Op.PUBLISH, [topic, value]:
                return [(caller, _OK), *self._set(_published(topic, rank), value)]
            case Op.READ, [topic, whose, milliseconds]:
                key = _published(topic, unpack_int(whose))
                return self._wait(caller, _Wait((key,), now + unpack_int(milliseconds) / 1e3, reads=True))
            case Op.ABORT, [reason]:
                return [(caller, _OK), *self.abort(rank, reason.decode(errors="replace"))]
            case Op.LOOK, []:
                return [(caller, self._abort or _OK)]
            case Op.LEAVE, []:
                self._left.add(rank)
                return [(caller, _OK), *self._give_up_meetings_without(rank)]
            case Op.SET, [key, value]:
                return [(caller, _OK), *self._set(b"group/" + key, value)]
            case Op.GET, [key, milliseconds]:
                wait = _Wait((b"group/" + key,), now + unpack_int(milliseconds) / 1e3, reads=True)
                return self._wait(caller, wait)
            case Op.WAIT, [milliseconds, *keys]:
                wanted = tuple(b"group/" + key for key in keys)
                return self._wait(caller, _Wait(wanted, now + unpack_int(milliseconds) / 1e3, reads=False))
            case Op.CHECK, keys:
                there = all(b"group/" + key in self._values for key in keys)
                return [(caller, pack_body(Status.OK, [b"\1" if there else b"\0"]))]
            case Op.ADD, [key, amount]:
                try:
                    total = int(self._values.get(b"group/" + key, b"0")) + unpack_int(amount)
                    answer = pack_body(Status.OK, [pack_int(total)])
                except (ValueError, OverflowError):
                    raise Malformed("it adds to what is no number of 64 bits") from None
                return [(caller, answer), *self._set(b"group/" + key, b"%d" % total)]
            case Op.DELETE, [key]:
                there = self._values.pop(b"group/" + key, None) is not None
                return [(caller, pack_body(Status.OK, [b"\1" if there else b"\0"]))]
        raise Malformed(f"request {code} with {len(fields)} fields is unknown; another version of rlrefit?")

    def lost(self, rank: int) -> list[Answer]:
        """The connection of ``rank`` has ended; unless it said so before, it is dead."""
        if rank in self._left:
            return []
        return self.abort(
            rank, "its connection to the rendezvous ended: its process died, or its host went away"
        )

    def forget(self, caller: Caller) -> None:
        """A connection has ended: owe it nothing."""
        self._waits.pop(caller, None)
        for meeting in self._meetings.values():
            for rank in [r for r, (who, _, _) in meeting.arrived.items() if who == caller]:
                del meeting.arrived[rank]

    def abort(self, rank: int, reason: str) -> list[Answer]:
        """``rank`` gave up; the first to do so is the cause, and the others' reasons are its consequences."""
        if self._abort is not None:
            return []
        self._abort = pack_body(Status.ABORTED, [pack_int(rank), reason.encode()])
        waiting = [*self._waits, *(who for m in self._meetings.values() for who, _, _ in m.arrived.values())]
        self._waits.clear()
        self._meetings.clear()
        return [(caller, self._abort) for caller in waiting]

    def expire(self, now: float) -> list[Answer]:
        """End what has waited too long. A meeting that runs out ends the epoch, and names who is missing."""
        answers: list[Answer] = []
        for caller in [caller for caller, wait in self._waits.items() if wait.deadline <= now]:
            del self._waits[caller]
            answers.append((caller, pack_body(Status.TIMEOUT)))
        late = [topic for topic, meeting in self._meetings.items() if meeting.deadline <= now]
        for topic in late:
            if topic not in self._meetings:
                continue  # an earlier one has ended the epoch
            meeting = self._meetings.pop(topic)
            missing = [rank for rank in range(self._world.size) if rank not in meeting.arrived]
            timeout = pack_body(Status.TIMEOUT, [pack_int(rank) for rank in missing])
            answers += [(who, timeout) for who, _, _ in meeting.arrived.values()]
            names = ", ".join(self._world.describe(rank) for rank in missing)
            reason = (
                f"{names} did not come to {topic.decode(errors='replace')} within {meeting.seconds:.1f} s"
            )
            answers += self.abort(min(meeting.arrived, default=0), reason)
        deadlines = [w.deadline for w in self._waits.values()] + [m.deadline for m in self._meetings.values()]
        self.next_deadline = min(deadlines, default=float("inf"))
        return answers

    def _meet(
        self,
        caller: Caller,
        rank: int,
        topic: bytes,
        now: float,
        deadline: float,
        compare: bool,
        flag: bool,
        value: bytes,
    ) -> list[Answer]:
        if self._abort is not None:
            return [(caller, self._abort)]
        meeting = self._meetings.get(topic)
        if meeting is None:
            meeting = self._meetings[topic] = _Meeting(compare, deadline, deadline - now)
        if meeting.compare != compare or rank in meeting.arrived:
            why = b"this rank is there already, or another one meets there for another purpose"
            return [(caller, pack_body(Status.REFUSED, [why]))]
        if deadline < meeting.deadline:
            meeting.deadline, meeting.seconds = deadline, deadline - now
        self.next_deadline = min(self.next_deadline, meeting.deadline)
        meeting.arrived[rank] = (caller, flag, value)
        if len(meeting.arrived) < self._world.size:
            return self._give_up_meetings_without(*self._left)
        del self._meetings[topic]
        return self._end_of(meeting)

    def _end_of(self, meeting: _Meeting) -> list[Answer]:
        arrived = [meeting.arrived[rank] for rank in range(self._world.size)]
        values = [value for _, _, value in arrived]
        if not meeting.compare:
            answer = pack_body(Status.OK, values)
        elif len(set(values)) > 1:
            answer = pack_body(Status.DIFFER, values)
        else:
            answer = pack_body(Status.OK, [b"\1" if any(flag for _, flag, _ in arrived) else b"\0"])
        # Rank 0 last: it shares the interpreter with the server, and once it runs on it would hold up the rest.
        return [(who, answer) for who, _, _ in reversed(arrived)]

    def _give_up_meetings_without(self, *gone: int) -> list[Answer]:
        """A rank that has left comes to no meeting any more."""
        for meeting in self._meetings.values():
            missing = [rank for rank in gone if rank not in meeting.arrived]
            if missing and meeting.arrived:
                return self.abort(missing[0], "it has closed its session")
        return []

    def _wait(self, caller: Caller, wait: _Wait) -> list[Answer]:
        if all(key in self._values for key in wait.keys):
            return [(caller, self._answer_to(wait))]
        if self._abort is not None:
            return [(caller, self._abort)]
        self._waits[caller] = wait
        self.next_deadline = min(self.next_deadline, wait.deadline)
        return []

    def _set(self, key: bytes, value: bytes) -> list[Answer]:
        self._values[key] = value
        served = [
            caller
            for caller, wait in self._waits.items()
            if key in wait.keys and all(other in self._values for other in wait.keys)
        ]
        return [(caller, self._answer_to(self._waits.pop(caller))) for caller in served]

    def _answer_to(self, wait: _Wait) -> bytes:
        return pack_body(Status.OK, [self._values[wait.keys[0]]]) if wait.reads else _OK


def _published(topic: bytes, rank: int) -> bytes:
    return b"published/" + topic + b"/%d" % rank
