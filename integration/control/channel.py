"""The control channel: plain data, votes and barriers between the ranks of a refit world.

Nothing bulky travels here and nothing is pickled: messages are JSON. Every wait has a limit, and a rank
that gives up or dies ends every other rank's wait at once, so one failure ends all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from ..errors import PeerLost, RefitError, RefitMismatch, RefitTimeout, end_all
from . import Connection, GroupStore, Rendezvous
from .decoding import decode_from
from .epoch_state import PATIENCE_S, PATIENCE_SHARE
from .frames import (
    NO_RANK,
    Malformed,
    Op,
    Status,
    pack_json,
    pack_numbers,
    pack_wait,
    unpack_int,
    unpack_json,
    unpack_numbers,
    unpack_values,
)
from .world import RefitWorld, whole_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

# Seconds for telling the others that this rank gives up. The rendezvous may be what failed, and the rank's error must be raised.
_FAREWELL_S = 5.0


class Channel:
    """Votes and meetings among the ranks of one epoch; used from one thread.

    Attributes:
        held_back: topic of the last meeting that, as the rendezvous answered, no rank has passed; empty before. After a broken
            connection or an interrupt it is not known whether others passed.
    """

    def __init__(self, rendezvous: Rendezvous, world: RefitWorld, timeout_s: float):
        """Connect to the rendezvous.

        Args:
            rendezvous: where to connect.
            world: membership seen from this rank.
            timeout_s: seconds that any wait may take.

        Raises:
            RefitTimeout: nobody answers at the address.
            RefitError: the token is missing or wrong, or another process has this rank.
        """
        self.world = world
        self.timeout_s = timeout_s
        self._until = float("inf")
        self._rendezvous = rendezvous
        self._connection = Connection(rendezvous, world.rank, timeout_s)
        self._store: GroupStore | None = None
        self.held_back = ""

    @property
    def turn(self) -> int:
        """At which message the epoch's sampled checks begin; the same on all ranks (:attr:`Rendezvous.turn`)."""
        return self._rendezvous.turn

    @property
    def address(self) -> str:
        """This host's address on its way to the rendezvous."""
        return self._connection.address

    @property
    def store(self) -> GroupStore:
        """The store from which process groups of this epoch are made; connected at its first use."""
        if self._store is None:
            self._store = GroupStore(self._rendezvous, self.world.rank, self.limit)
        return self._store

    @contextmanager
    def within(self, start: float) -> Iterator[None]:
        """Have all waits of a ``with`` block end within ``timeout_s`` after ``start``, which ``time.monotonic()`` gave."""
        self._until = start + self.timeout_s
        try:
            yield
        finally:
            self._until = float("inf")

    def limit(self) -> float:
        """Seconds that a wait may take at the moment.

        Raises:
            RefitTimeout: the time of all waits together is up.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise RefitTimeout(
                f"this rank did not finish within {self.timeout_s:.1f} s, the limit for the whole act. If peers or its own "
                "work are only slow, raise policy.refit.timeout_s",
                stage="open",
                rank=self.world.rank,
            )
        return min(self.timeout_s, left)

    def vote(self, topic: str, data: Any) -> list[Any]:
        """Give ``data`` and get what all ranks gave, in the order of ranks; as :meth:`vote_parts`."""
        return [row[0] for row in self.vote_parts(topic, [data])]

    def vote_as[T: DataclassInstance](self, topic: str, ours: T) -> list[T]:
        """As :meth:`vote` with a dataclass, of which each rank gives one.

        Raises:
            RefitMismatch: what a rank told is of another form; names the rank and the field.
        """
        told = self.vote(topic, asdict(ours))
        return [
            decode_from(type(ours), data, sender, self.world.describe(sender), topic, stage=topic)
            for sender, data in enumerate(told)
        ]

    def vote_parts(self, topic: str, parts: Sequence[Any]) -> list[list[Any]]:
        """Give any number of ``parts`` and get those of all ranks. A barrier: nobody passes early.

        What several ranks give alike travels once, and is one and the same object in what is returned.

        Args:
            topic: the same on all ranks, and new for each vote.
            parts: plain data.

        Returns:
            The parts of each rank, in the order of ranks.

        Raises:
            RefitError: they are larger than a message may be; on all ranks, if all together are.
            RefitTimeout: ranks do not vote in time; names them, on all ranks that did.
            PeerLost: another rank gave up.
        """
        return self.exchange(topic, parts, {})[0]

    def exchange(
        self, topic: str, parts: Sequence[Any], direct: Mapping[int, Any]
    ) -> tuple[list[list[Any]], dict[int, Any]]:
        """As :meth:`vote_parts`, with plain data beside it that only one rank gets.

        Args:
            topic: the same on all ranks, and new for each exchange.
            parts: plain data for all.
            direct: plain data by the rank that gets it.

        Returns:
            The parts of each rank, and the direct data for this one by their senders.
        """
        values = [self._packed(topic, data) for data in (*direct.values(), *parts)]
        _, answer = self._meet(topic, values, direct=list(direct), compare=False, flags=0)
        rows = self._rows(answer[0], topic)
        senders = unpack_numbers(answer[1])
        return rows, {
            sender: self._unpacked(data, topic, sender)
            for sender, data in zip(senders, answer[2:], strict=True)
        }

    def barrier(self, topic: str, flags: int = 0, version: int | None = None) -> int:
        """Wait until all ranks are here.

        Args:
            topic: the same on all ranks, and new for each barrier.
            flags: this rank's, up to 8 bits.
            version: has to be equal on all ranks.

        Returns:
            The flags that are set on any rank.

        Raises:
            RefitMismatch: on every rank, if ``version`` differs; lists what the ranks gave.
            RefitTimeout: ranks do not come in time; names them, on all ranks that did.
            PeerLost: another rank gave up.
        """
        # Text and no JSON, whose encoder would be the slowest part of a refit's meetings.
        values = [] if version is None else [str(version).encode()]
        status, answer = self._meet(topic, values, compare=True, flags=flags)
        if status is Status.DIFFER:
            rows, given = unpack_values(answer[0])
            told = [given[row[0]].decode(errors="replace") if row else "none" for row in rows]
            listed = ", ".join(f"{self.world.describe(r)}: {v}" for r, v in enumerate(told))
            raise RefitMismatch(
                f"the ranks were called with different versions: {listed}. Nothing has moved; call all ranks alike",
                stage=topic,
                rank=self.world.rank,
            )
        return answer[0][0]

    def abort(self, reason: str, *, symptom: bool = False) -> None:
        """Tell all ranks that this one gives up, so that none waits for it.

        Args:
            reason: what the others are told.
            symptom: whether it only follows from another rank's end. All ranks are then told that end, if it is known soon.
        """
        fields = [reason.encode()]
        if symptom:
            fields.append(pack_wait(self._patience))
        try:
            self._connection.request(Op.ABORT, fields, stage="abort", limit_s=self._farewell)
        except PeerLost as error:
            # The ranks that could hear of it lose the same rendezvous; the caller's own error matters more.
            logger.warning("could not tell the other ranks that this one gives up: %s", error)

    def give_up(self, error: BaseException) -> None:
        """As :meth:`abort`, for an error of this rank."""
        self.abort(_told(error), symptom=_is_symptom(error))

    def cause_of(self, error: BaseException) -> BaseException:
        """What to raise after this rank gave up with ``error``: why the first rank gave up, if that is known, or ``error``.

        A connection that breaks names only the neighbour. The rendezvous knows who ended, or soon will. Call this after this
        rank has closed its connections, so that ranks that wait for it can report what they saw. Trainer rank 0 waits a moment
        until all others know too, since the rendezvous may end with its process.
        """
        if not isinstance(error, RefitError):
            return error
        symptom = _is_symptom(error)
        hosts = self.world.rank == 0 and error.blamed > 0
        if symptom or hosts:
            try:
                self._ask(Op.CAUSE, [pack_wait(self._patience)], error.stage, self._patience)
            except RefitError as cause:
                if symptom and cause.blamed != self.world.rank:
                    return cause
        return error

    def check_abort(self, stage: str) -> None:
        """Raise PeerLost if a rank has given up or died, and RefitTimeout as :meth:`limit`."""
        self._ask(Op.LOOK, [], stage)
        self.limit()

    @property
    def _patience(self) -> float:
        return min(PATIENCE_S, PATIENCE_SHARE * self.timeout_s)

    @property
    def _farewell(self) -> float:
        return min(_FAREWELL_S, self.timeout_s)

    def close(self) -> None:
        """Leave the epoch; safe to call twice. The groups made from :attr:`store` are closed by now."""
        if self._store is not None:
            self._store.close()
        try:
            self._connection.request(Op.LEAVE, [], stage="close", limit_s=self._farewell)
        except PeerLost as error:
            logger.debug("the rendezvous is gone as this rank leaves: %s", error)
        self._connection.close()

    def _meet(
        self, topic: str, values: Sequence[bytes], *, direct: Sequence[int] = (), compare: bool, flags: int
    ) -> tuple[Status, list[bytes]]:
        wait = self.limit()
        fields = [
            topic.encode(),
            pack_wait(wait),
            b"\1" if compare else b"\0",
            bytes((flags,)),
            pack_numbers(direct),
            *values,
        ]
        status, answer = self._ask(Op.MEET, fields, topic, wait)
        if status is Status.TIMEOUT:
            self._late(unpack_int(answer[0]), answer[1].decode(errors="replace"), topic, wait)
        return status, answer

    def _ask(
        self, op: Op, fields: list[bytes], stage: str, wait_s: float = 0.0
    ) -> tuple[Status, list[bytes]]:
        status, answer = self._connection.request(op, fields, stage=stage, wait_s=wait_s)
        if op is Op.MEET and status in (Status.DIFFER, Status.TIMEOUT, Status.ABORTED):
            self.held_back = stage
        if status is Status.ABORTED:
            raise PeerLost(
                answer[1].decode(errors="replace"),
                stage=stage,
                rank=self.world.rank,
                blamed=unpack_int(answer[0]),
            )
        if status is Status.REFUSED:
            raise RefitError(
                f"the rendezvous refused: {b'; '.join(answer).decode(errors='replace')}",
                stage=stage,
                rank=self.world.rank,
            )
        return status, answer

    def _late(self, rank: int, names: str, stage: str, waited_s: float) -> Never:
        raise RefitTimeout(
            f"{names} did not answer within {waited_s:.1f} s: dead, cut off, busy with an earlier request, or not called at all. "
            "Raise policy.refit.timeout_s if it is only slow.",
            stage=stage,
            rank=self.world.rank,
            blamed=rank,
        )

    def _packed(self, topic: str, data: Any) -> bytes:
        try:
            return pack_json(data)
        except Malformed as error:
            raise RefitError(
                f"what this rank has to tell about {topic} can't be sent: {error}",
                stage=topic,
                rank=self.world.rank,
            ) from error

    def _rows(self, answer: bytes, topic: str) -> list[list[Any]]:
        """What all ranks told; equal values are unpacked once."""
        places, table = unpack_values(answer)
        values: dict[int, Any] = {}
        for sender, row in enumerate(places):
            for place in row:
                if place not in values:
                    values[place] = self._unpacked(table[place], topic, sender)
        return [[values[place] for place in row] for row in places]

    def _unpacked(self, value: bytes, topic: str, sender: int) -> Any:
        try:
            return unpack_json(value)
        except Malformed as error:
            raise RefitMismatch(
                f"what {self.world.describe(sender)} tells about {topic} is malformed: {error}. Do all ranks run the "
                "same rlrefit?",
                stage=topic,
                rank=self.world.rank,
                blamed=sender,
            ) from error


@contextmanager
def refusals_told(rendezvous: Rendezvous, rank: object) -> Iterator[None]:
    """Tell all ranks of an epoch what ends the block, in which this process has not joined yet: it is raised by it, and they raise
    ``PeerLost`` with its text.

    Args:
        rendezvous: of the epoch.
        rank: that this process was to be; if it is none of the epoch's, the others hear that alone.
    """
    try:
        yield
    except BaseException as error:  # an interrupt, too: the others would wait for their whole limit
        end_all([partial(_refuse, rendezvous, rank, error)], error)
        raise


def _refuse(rendezvous: Rendezvous, rank: object, error: BaseException) -> None:
    number = whole_number(rank)
    try:
        connection = Connection(rendezvous, NO_RANK if number is None else min(number, NO_RANK), _FAREWELL_S)
        connection.request(Op.ABORT, [_told(error).encode()], stage="abort")
        connection.close()
    except RefitError as refused:
        # Of a process that can't be any rank the rendezvous tells all others itself.
        logger.info("the rendezvous did not take why this process does not join: %s", refused)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_symptom(error: BaseException) -> bool:
    """Whether an error only shows that some rank has ended, and not which."""
    return isinstance(error, (PeerLost, RefitTimeout)) and error.blamed < 0
