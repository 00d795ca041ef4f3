"""The rendezvous as torch's process groups see it: a ``Store`` whose bytes are signed like all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ..errors import PeerLost, RefitTimeout
from .address import Rendezvous
from .client import Connection
from .frames import Op, Role, Status, pack_int, pack_wait, unpack_int

_STAGE = "process group"


class GroupStore(Store):
    """What NCCL's and gloo's groups use of a store; it lives until :meth:`close`.

    torch calls it from threads of its own, through C++. It holds such stores without their Python halves,
    so whoever makes one has to keep it, and this one keeps its clones.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, limit: Callable[[], float]):
        """Connect; errors as of :class:`Connection`.

        Args:
            rendezvous: of the epoch.
            rank: refit-world rank of this process.
            limit: seconds that connecting or a wait may take at the moment; raises if the time is up.
        """
        super().__init__()
        self._made_with = (rendezvous, rank, limit)
        self._rank = rank
        self._limit = limit
        self._connection = Connection(rendezvous, rank, limit(), Role.GROUP_STORE)
        self._clones: list[GroupStore] = []

    def clone(self) -> GroupStore:
        """The same store over a connection of its own, so that a wait there holds nobody up here."""
        self._clones.append(GroupStore(*self._made_with))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._ask(Op.SET, [key.encode(), value.encode() if isinstance(value, str) else value])

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is set.

        Raises:
            RefitTimeout: it is not set in time.
        """
        wait = self._limit()
        return self._ask(Op.GET, [key.encode(), pack_wait(wait)], wait, f"{key} was not set")[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are set; raises as :meth:`get`."""
        wait = self._limit() if timeout is None else min(timeout.total_seconds(), self._limit())
        names = [key.encode() for key in keys]
        self._ask(Op.WAIT, [pack_wait(wait), *names], wait, f"{', '.join(keys)} were not all set")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return self._ask(Op.CHECK, [key.encode() for key in keys])[0] == b"\1"

    def add(self, key: str, value: int) -> int:
        """Add to a number that starts at 0, and return it."""
        return unpack_int(self._ask(Op.ADD, [key.encode(), pack_int(value)])[0])

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; whether it was set."""
        return self._ask(Op.DELETE, [key.encode()])[0] == b"\1"

    def close(self) -> None:
        """End its connections; the groups that use it are closed by now."""
        for clone in self._clones:
            clone.close()
        self._connection.close()

    def _ask(self, op: Op, fields: list[bytes], wait_s: float = 0.0, late: str = "") -> list[bytes]:
        status, answer = self._connection.request(op, fields, stage=_STAGE, wait_s=wait_s)
        if status is Status.OK:
            return answer
        if status is Status.ABORTED:
            raise PeerLost(
                answer[1].decode(errors="replace"),
                stage=_STAGE,
                rank=self._rank,
                blamed=unpack_int(answer[0]),
            )
        raise RefitTimeout(
            f"{late} within {wait_s:.0f} s; a peer did not join the group", stage=_STAGE, rank=self._rank
        )
