"""The state of an epoch at the rendezvous: values, meetings, waits, and why it ended. No sockets and no clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .frames import Body, Malformed, Op, Status, pack_body, pack_int, unpack_int, unpack_numbers
from .meeting import Answer, Arrival, Caller, Meeting
from .world import RefitWorld

_OK = pack_body(Status.OK)
# A rank may report a broken connection before the rank that broke it is known. This is how long to wait for the cause: in
# seconds, and as a share of the limit of the wait that failed.
PATIENCE_S, PATIENCE_SHARE = 1.0, 0.25


@dataclass(frozen=True)
class _Wait:
    """A caller that waits for keys. With ``reads`` it gets the value of the first."""

    rank: int
    keys: tuple[bytes, ...]
    deadline: float
    reads: bool


@dataclass
class _Doubt:
    """The epoch ends, and no rank has told the cause yet.

    Attributes:
        since: when it was noticed.
        until: until when the cause may come.
        saw: what each rank noticed, in the order in which they told it.
        late: the meeting that ran out of time and its name, if that was noticed first.
    """

    since: float
    until: float
    saw: dict[int, str] = field(default_factory=dict)
    late: tuple[str, Meeting] | None = None


class EpochState:
    """Values, meetings and the end of one epoch.

    Each call takes what happened and returns the answers that are due. A caller has one request at a time.
    Once it is known why the epoch ends, every wait is answered with that.

    A rank's own failure, its death and its leaving are causes. A connection that breaks, or a wait that runs out, is a
    symptom. A symptom may be told before its cause; the state then waits for the cause. If no cause comes, the ranks that
    have told nothing are blamed.

    Args:
        world: of trainer rank 0; for the number of ranks and their names.
    """

    def __init__(self, world: RefitWorld):
        self._world = world
        self._addresses: dict[int, str] = {}
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[Caller, _Wait] = {}
        self._meetings: dict[bytes, Meeting] = {}
        self._asking: dict[Caller, int] = {}
        # Trainer rank 0's question for the cause, and until when it may wait. Once it is answered, its process may end, and
        # the rendezvous with it.
        self._host: tuple[Caller, float] | None = None
        # Ranks that were blamed because they told nothing. They may never ask.
        self._silent: set[int] = set()
        self._doubt: _Doubt | None = None
        self._end: Body | None = None
        # Whether a rank has told the cause. Otherwise it is a guess.
        self._sure = False
        # Ranks that have given up or know why the epoch ends. What happens to them later is no cause.
        self._over: set[int] = set()
        self._heard: dict[int, float] = {}
        self._left: set[int] = set()
        self.next_deadline = float("inf")

    @property
    def entries(self) -> int:
        """Number of values, waits and meetings that are held. It does not grow with the refits."""
        return len(self._values) + len(self._waits) + len(self._meetings)

    @property
    def host_meets(self) -> bool:
        """Whether trainer rank 0 waits at a meeting."""
        return any(0 in meeting.arrived for meeting in self._meetings.values())

    def joined(self, rank: int, address: str) -> None:
        """A rank has come, from the host of ``address``; an empty one is not named."""
        self._addresses[rank] = address

    def request(self, caller: Caller, rank: int, code: int, fields: list[bytes], now: float) -> list[Answer]:
        """A request of ``rank``.

        Raises:
            Malformed: no rank of this version would ask that.
        """
        return [*self._request(caller, rank, code, fields, now), *self._release_host(now)]

    def _request(self, caller: Caller, rank: int, code: int, fields: list[bytes], now: float) -> list[Answer]:
        self._heard[rank] = now
        match code, fields:
            case Op.MEET, [topic, milliseconds, compare, flags, addressed, *values] if len(flags) == 1:
                deadline = now + unpack_int(milliseconds) / 1e3
                ranks = unpack_numbers(addressed)
                if len(values) < len(ranks) or max(ranks, default=0) >= self._world.size:
                    raise Malformed("direct data for ranks that do not exist, or none for a rank")
                direct = dict(zip(ranks, values, strict=False))
                arrival = Arrival(caller, flags[0], tuple(values[len(ranks) :]), direct)
                return self._meet(rank, topic, now, deadline, compare == b"\1", arrival)
            case Op.ABORT, [reason]:
                text = f"{self._name(rank)} gave up: {reason.decode(errors='replace')}"
                return [(caller, _OK), *self._conclude(rank, text)]
            case Op.ABORT, [reason, milliseconds]:
                patience = unpack_int(milliseconds) / 1e3
                return [(caller, _OK), *self._saw(rank, reason.decode(errors="replace"), now, patience)]
            case Op.CAUSE, [milliseconds]:
                if rank == 0 and (self._doubt is not None or self._end is not None):
                    self._host = caller, now + unpack_int(milliseconds) / 1e3
                    self.next_deadline = min(self.next_deadline, self._host[1])
                    return []
                if self._doubt is None:
                    return [(caller, self._told(rank))]
                self._asking[caller] = rank
                return []
            case Op.LOOK, []:
                return [(caller, self._told(rank))]
            case Op.LEAVE, []:
                self._left.add(rank)
                return [(caller, _OK), *self._give_up_meetings_without(rank)]
            case Op.SET, [key, value]:
                return [(caller, _OK), *self._set(key, value)]
            case Op.GET, [key, milliseconds]:
                return self._wait(
                    caller, _Wait(rank, (key,), now + unpack_int(milliseconds) / 1e3, reads=True)
                )
            case Op.WAIT, [milliseconds, *keys]:
                deadline = now + unpack_int(milliseconds) / 1e3
                return self._wait(caller, _Wait(rank, tuple(keys), deadline, reads=False))
            case Op.CHECK, keys:
                there = all(key in self._values for key in keys)
                return [(caller, pack_body(Status.OK, [b"\1" if there else b"\0"]))]
            case Op.ADD, [key, amount]:
                try:
                    total = int(self._values.get(key, b"0")) + unpack_int(amount)
                    answer = pack_body(Status.OK, [pack_int(total)])
                except (ValueError, OverflowError):
                    raise Malformed("it adds to what is no number of 64 bits") from None
                return [(caller, answer), *self._set(key, b"%d" % total)]
            case Op.DELETE, [key]:
                there = self._values.pop(key, None) is not None
                return [(caller, pack_body(Status.OK, [b"\1" if there else b"\0"]))]
        raise Malformed(f"request {code} with {len(fields)} fields is unknown; another version of rlrefit?")

    def turned_away(self, rank: int, address: str, why: str) -> list[Answer]:
        """A process that holds the token can't be ``rank``, or any rank: -1."""
        answers = self._conclude(rank, f"a process at {address} can't join: {why}")
        return [*answers, *self._release_host(0.0)]

    def lost(self, rank: int) -> list[Answer]:
        """The connection of ``rank`` has ended. If the rank did not leave before, it is dead."""
        if rank in self._left:
            return []
        answers = self._conclude(
            rank,
            f"{self._name(rank)} is lost: its connection to the rendezvous ended, since its process died or its host went away. "
            "The epoch is over: meet again without it, or with another in its place",
        )
        self._over.add(rank)
        return [*answers, *self._release_host(0.0)]

    def forget(self, caller: Caller) -> None:
        """A connection has ended: drop what it waits for."""
        self._waits.pop(caller, None)
        self._asking.pop(caller, None)
        if self._host is not None and self._host[0] == caller:
            self._host = None
        meetings = [*self._meetings.values()]
        if self._doubt is not None and self._doubt.late is not None:
            meetings.append(self._doubt.late[1])
        for meeting in meetings:
            for rank in [r for r, arrival in meeting.arrived.items() if arrival.caller == caller]:
                del meeting.arrived[rank]

    def expire(self, now: float) -> list[Answer]:
        """End what has waited too long. A meeting that runs out of time ends the epoch, and names the missing ranks."""
        answers: list[Answer] = []
        for caller in [caller for caller, wait in self._waits.items() if wait.deadline <= now]:
            del self._waits[caller]
            answers.append((caller, pack_body(Status.TIMEOUT)))
        if self._doubt is None:
            late = next((topic for topic, m in self._meetings.items() if m.deadline <= now), None)
            if late is not None:
                meeting = self._meetings.pop(late)
                patience = min(PATIENCE_S, PATIENCE_SHARE * meeting.seconds)
                self._doubt = _Doubt(now, now + patience, late=(late.decode(errors="replace"), meeting))
        elif self._doubt.until <= now:
            answers += self._guess(self._doubt)
        answers += self._release_host(now)
        deadlines = [wait.deadline for wait in self._waits.values()]
        if self._doubt is not None:
            deadlines.append(self._doubt.until)
        else:
            deadlines += [meeting.deadline for meeting in self._meetings.values()]
            if self._host is not None:
                deadlines.append(self._host[1])
        self.next_deadline = min(deadlines, default=float("inf"))
        return answers

    def _conclude(self, rank: int, text: str, *, sure: bool = True, late: Sequence[int] = ()) -> list[Answer]:
        """End the epoch. ``rank`` is blamed; -1 blames none. The ranks at a meeting are told which ranks were ``late``."""
        if (sure and rank in self._over) or (self._end is not None and (self._sure or not sure)):
            return []
        self._end = pack_body(Status.ABORTED, [pack_int(rank), text.encode()])
        self._sure = sure
        came: dict[int, Arrival] = {}
        if self._doubt is not None and self._doubt.late is not None:
            came = self._doubt.late[1].arrived
        told = pack_body(Status.TIMEOUT, [pack_int(rank), self._names(late).encode()]) if late else self._end
        answers = [(arrival.caller, told) for arrival in came.values()]
        answers += [(caller, self._end) for caller in (*self._waits, *self._asking)]
        answers += [(a.caller, self._end) for m in self._meetings.values() for a in m.arrived.values()]
        self._over |= {*came, *self._waiting()}
        if sure:
            self._over.add(rank)
        self._doubt = None
        self._waits.clear()
        self._asking.clear()
        self._meetings.clear()
        return answers

    def _release_host(self, now: float) -> list[Answer]:
        """Tell trainer rank 0 why the epoch ends, once all other ranks know or its time is up."""
        if self._host is None or self._end is None:
            return []
        caller, until = self._host
        unaware = set(range(1, self._world.size)) - self._over - self._left - self._silent
        if unaware and now < until:
            return []
        self._host = None
        return [(caller, self._told(0))]

    def _told(self, rank: int) -> Body:
        """The answer to a rank that asks why the epoch ends."""
        if self._end is None:
            return _OK
        self._over.add(rank)
        return self._end

    def _saw(self, rank: int, what: str, now: float, patience: float) -> list[Answer]:
        """``rank`` gave up because of a symptom: the cause is another rank's."""
        if self._end is None:
            if self._doubt is None:
                self._doubt = _Doubt(now, now + patience)
            self._doubt.saw.setdefault(rank, what)
            self.next_deadline = min(self.next_deadline, self._doubt.until)
        self._over.add(rank)
        return []

    def _waiting(self) -> set[int]:
        """Ranks that wait for an answer."""
        waits = {wait.rank for wait in self._waits.values()}
        asking = {*self._asking.values()} | ({0} if self._host is not None else set())
        return waits.union(asking, *(meeting.arrived for meeting in self._meetings.values()))

    def _guess(self, doubt: _Doubt) -> list[Answer]:
        """No cause has come. Blame the ranks that have told nothing, or else the rank that noticed it first."""
        patience = doubt.until - doubt.since
        heard = {rank for rank, when in self._heard.items() if when > doubt.since - patience}
        came = doubt.late[1].arrived if doubt.late is not None else {}
        alive = heard.union(doubt.saw, came, self._waiting(), self._left)
        silent = [rank for rank in range(self._world.size) if rank not in alive]
        self._silent = {*silent}
        first, what = next(iter(doubt.saw.items()), (-1, ""))
        if doubt.late is not None:
            topic, meeting = doubt.late
            missing = [rank for rank in range(self._world.size) if rank not in came]
            late = [rank for rank in missing if rank in silent] or missing
            text = f"{self._names(late)} did not come to {topic} within {meeting.seconds:.1f} s"
            return self._conclude(late[0], text, sure=False, late=late)
        gone = sorted(self._left - self._over)
        if gone:
            return self._conclude(gone[0], f"{self._names(gone)} gave up: closed the session", sure=False)
        seen = f"{self._name(first)} was the first to notice: {what}"
        if not silent:
            return self._conclude(first, seen, sure=False)
        text = f"{self._names(silent)} did not answer: frozen, busy for too long, or cut off. {seen}"
        return self._conclude(silent[0] if len(silent) == 1 else -1, text, sure=False)

    def _name(self, rank: int) -> str:
        """What a user calls a rank, and where it is."""
        address = self._addresses.get(rank)
        return f"{self._world.describe(rank)} at {address}" if address else self._world.describe(rank)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._name, ranks))

    def _meet(
        self,
        rank: int,
        topic: bytes,
        now: float,
        deadline: float,
        compare: bool,
        arrival: Arrival,
    ) -> list[Answer]:
        caller = arrival.caller
        if self._end is not None:
            return [(caller, self._told(rank))]
        meeting = self._meetings.get(topic)
        if meeting is None:
            meeting = self._meetings[topic] = Meeting(compare, deadline, deadline - now)
        if meeting.compare != compare or rank in meeting.arrived:
            why = b"this rank is there already, or another one meets there for another purpose"
            return [(caller, pack_body(Status.REFUSED, [why]))]
        if deadline < meeting.deadline:
            meeting.deadline, meeting.seconds = deadline, deadline - now
        self.next_deadline = min(self.next_deadline, meeting.deadline)
        meeting.arrive(rank, arrival)
        if meeting.too_large:
            most, text = meeting.why_too_large(topic.decode(errors="replace"), self._world)
            return self._conclude(most, text)
        if len(meeting.arrived) < self._world.size:
            return self._give_up_meetings_without(*self._left)
        if self._doubt is not None:
            return []  # a rank has given up, so no rank may go on
        del self._meetings[topic]
        return meeting.answers(self._world.size)

    def _give_up_meetings_without(self, *gone: int) -> list[Answer]:
        """End the epoch if a meeting waits for a rank that has left."""
        for meeting in self._meetings.values():
            missing = [rank for rank in gone if rank not in meeting.arrived and rank not in self._over]
            if missing and meeting.arrived:
                return self._conclude(
                    missing[0], f"{self._name(missing[0])} gave up: it has closed its session"
                )
        return []

    def _wait(self, caller: Caller, wait: _Wait) -> list[Answer]:
        if all(key in self._values for key in wait.keys):
            return [(caller, self._answer_to(wait))]
        if self._end is not None:
            return [(caller, self._told(wait.rank))]
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

    def _answer_to(self, wait: _Wait) -> Body:
        return pack_body(Status.OK, [self._values[wait.keys[0]]]) if wait.reads else _OK
