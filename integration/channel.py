"""The control channel: plain data, votes and barriers between the ranks of a refit world.

Nothing bulky travels here and nothing is pickled: messages are JSON. Every wait has a limit, and a rank
that gives up or dies ends every other rank's wait at once, so one failure ends all ranks.
"""

from __future__ import annotations

import logging
from typing import Any, Never

from .errors import PeerLost, RefitError, RefitMismatch, RefitTimeout
from .rendezvous import Connection, GroupStore, Rendezvous
from .rendezvous.wire import Malformed, Op, Status, pack_int, pack_json, pack_wait, unpack_int, unpack_json
from .world import RefitWorld

logger = logging.getLogger(__name__)

# For the last words of a rank: who listens may be what it gave up on, and its own error must come out.
_FAREWELL_S = 5.0


class Channel:
    """Publish, read, vote and meet among the ranks of one epoch; used from one thread.

    Attributes:
        shared_wire: whether the groups of this epoch go through memory that the ranks of its host share, even where
            NCCL or gloo could join them.
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
        self._rendezvous = rendezvous
        self._connection = Connection(rendezvous, world.rank, timeout_s)
        self._store: GroupStore | None = None
        self.shared_wire = False

    @property
    def store(self) -> GroupStore:
        """The store from which process groups of this epoch are made; connected at its first use."""
        if self._store is None:
            self._store = GroupStore(self._rendezvous, self.world.rank, self.timeout_s)
        return self._store

    def publish(self, topic: str, data: Any) -> None:
        """Set this rank's ``data`` (JSON) under ``topic``.

        Raises:
            RefitError: it is larger than a message may be.
        """
        self._ask(Op.PUBLISH, [topic.encode(), self._packed(topic, data)], topic)

    def read(self, topic: str, rank: int) -> Any:
        """What ``rank`` published under ``topic``; waits for it.

        Raises:
            RefitTimeout: it does not come in time; names the rank that is late.
            PeerLost: another rank gave up meanwhile; says which and why.
        """
        fields = [topic.encode(), pack_int(rank), pack_wait(self.timeout_s)]
        status, answer = self._ask(Op.READ, fields, topic)
        if status is Status.TIMEOUT:
            self._late([rank], topic)
        return self._unpacked(answer[0], topic, rank)

    def vote(self, topic: str, data: Any) -> list[Any]:
        """Give ``data`` and get what all ranks gave, in the order of ranks. A barrier: nobody passes early.

        Raises:
            RefitTimeout: ranks do not vote in time; names them, on all ranks that did.
            PeerLost: another rank gave up.
        """
        _, answer = self._meet(topic, self._packed(topic, data), compare=False, flag=False)
        return [self._unpacked(value, topic, rank) for rank, value in enumerate(answer)]

    def barrier(self, topic: str, flag: bool = False, agree: Any = None) -> bool:
        """Wait until all ranks are here.

        Args:
            topic: the same on all ranks, and new for each barrier.
            flag: this rank's.
            agree: plain data that has to be equal on all ranks.

        Returns:
            Whether any rank's flag is set.

        Raises:
            RefitMismatch: on every rank, if ``agree`` differs; lists what the ranks gave.
            RefitTimeout: ranks do not come in time; names them, on all ranks that did.
            PeerLost: another rank gave up.
        """
        status, answer = self._meet(topic, self._packed(topic, agree), compare=True, flag=flag)
        if status is Status.DIFFER:
            given = [self._unpacked(value, topic, rank) for rank, value in enumerate(answer)]
            listed = ", ".join(f"{self.world.describe(r)}: {v}" for r, v in enumerate(given))
            raise RefitMismatch(
                f"the ranks were called with different values: {listed}. Nothing has moved; call all ranks alike",
                stage=topic,
                rank=self.world.rank,
            )
        return answer[0] == b"\1"

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one gives up, so that none waits for it."""
        try:
            self._connection.request(Op.ABORT, [reason.encode()], stage="abort", limit_s=_FAREWELL_S)
        except PeerLost as error:
            # The ranks that could hear of it lose the same rendezvous; the caller's own error matters more.
            logger.warning("could not tell the other ranks that this one gives up: %s", error)

    def check_abort(self, stage: str) -> None:
        """Raise PeerLost if a rank has given up or died."""
        self._ask(Op.LOOK, [], stage)

    def close(self) -> None:
        """Leave the epoch; safe to call twice. The groups made from :attr:`store` are closed by now."""
        if self._store is not None:
            self._store.close()
        try:
            self._connection.request(Op.LEAVE, [], stage="close", limit_s=_FAREWELL_S)
        except PeerLost as error:
            logger.debug("nobody to say good-bye to: %s", error)
        self._connection.close()

    def _meet(self, topic: str, value: bytes, *, compare: bool, flag: bool) -> tuple[Status, list[bytes]]:
        fields = [
            topic.encode(),
            pack_wait(self.timeout_s),
            b"\1" if compare else b"\0",
            b"\1" if flag else b"\0",
            value,
        ]
        status, answer = self._ask(Op.MEET, fields, topic)
        if status is Status.TIMEOUT:
            self._late([unpack_int(rank) for rank in answer], topic)
        return status, answer

    def _ask(self, op: Op, fields: list[bytes], stage: str) -> tuple[Status, list[bytes]]:
        status, answer = self._connection.request(op, fields, stage=stage)
        if status is Status.ABORTED:
            who = self.world.describe(unpack_int(answer[0]))
            raise PeerLost(
                f"{who} gave up: {answer[1].decode(errors='replace')}", stage=stage, rank=self.world.rank
            )
        if status is Status.REFUSED:
            raise RefitError(
                f"the rendezvous refused: {b'; '.join(answer).decode(errors='replace')}",
                stage=stage,
                rank=self.world.rank,
            )
        return status, answer

    def _late(self, ranks: list[int], stage: str) -> Never:
        message = (
            f"{', '.join(self.world.describe(rank) for rank in ranks)} did not answer within {self.timeout_s:.1f} s: "
            "dead, busy with an earlier request, or not called at all. Raise policy.refit.timeout_s if it is only slow."
        )
        self.abort(message)
        raise RefitTimeout(message, stage=stage, rank=self.world.rank)

    def _packed(self, topic: str, data: Any) -> bytes:
        try:
            return pack_json(data)
        except Malformed as error:
            raise RefitError(
                f"what this rank has to tell about {topic} can't be sent: {error}",
                stage=topic,
                rank=self.world.rank,
            ) from error

    def _unpacked(self, value: bytes, topic: str, sender: int) -> Any:
        try:
            return unpack_json(value)
        except Malformed as error:
            raise RefitMismatch(
                f"what {self.world.describe(sender)} tells about {topic} is malformed: {error}. Do all ranks run the "
                "same rlrefit?",
                stage=topic,
                rank=self.world.rank,
            ) from error
