"""The control channel: plain data and votes between the ranks of a refit world, over a TCPStore.

Nothing bulky travels here and nothing is pickled: messages are JSON. Every wait has a deadline, and
every wait also watches for the abort that a failing rank leaves, so one failure ends all ranks.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from .errors import PeerLost, RefitError, RefitMismatch, RefitTimeout
from .world import RefitWorld

logger = logging.getLogger(__name__)

# Pauses between looks at the store, in seconds: short at first, since peers are mostly close behind.
# (The store's own wait would block, and log a warning each time it runs out.)
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-4, 1e-2
_ABORT_CHECK_EVERY = 0.25
# Trainer rank 0 collects the votes and so knows who is missing: it must give up before those who wait for it.
_COLLECTOR_GRACE = 2.0
_ABORT = "abort"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one epoch meet.

    Attributes:
        host: address of trainer rank 0 as the other ranks reach it.
        port: its TCP port.
        train_ranks: number of trainer ranks.
        gen_ranks: number of generation ranks over all replicas.
        epoch: number of the membership; keys of different epochs do not meet.
    """

    host: str
    port: int
    train_ranks: int
    gen_ranks: int
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, to hand to the other ranks by whatever launches them."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Rendezvous:
        """Inverse of :meth:`to_json`."""
        return Rendezvous(**data)


def open_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Start the store of an epoch on this host; trainer rank 0 does. ``port`` 0 takes any free port.

    Raises:
        RefitError: the port is taken.
    """
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except DistNetworkError as error:
        raise RefitError(
            f"port {port} on {host} can't be opened for the refit's rendezvous: {error}. "
            "Another process holds it, or the address is not this host's; set policy.refit.port to a free port, "
            "or to 0 for any.",
            stage="rendezvous",
        ) from error


class Channel:
    """Publish, read and vote among the ranks of one epoch."""

    def __init__(
        self, rendezvous: Rendezvous, world: RefitWorld, timeout_s: float, store: TCPStore | None = None
    ):
        """Connect to the rendezvous.

        Args:
            rendezvous: where to connect.
            world: membership seen from this rank.
            timeout_s: seconds that any wait may take.
            store: the store itself, on the rank that opened it.

        Raises:
            RefitTimeout: nobody answers at the address.
        """
        self.world = world
        self.timeout_s = timeout_s
        if store is None:
            try:
                store = TCPStore(
                    rendezvous.host,
                    rendezvous.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_s),
                )
            except (DistNetworkError, DistStoreError) as error:
                raise RefitTimeout(
                    f"no rendezvous at {rendezvous.host}:{rendezvous.port} within {timeout_s:.0f} s: {error}. "
                    "Is trainer rank 0 up, and is the port open between the hosts?",
                    stage="rendezvous",
                    rank=world.rank,
                ) from error
        self._owner = store
        self.store = PrefixStore(f"epoch{rendezvous.epoch}", store)
        self._last_result: str | None = None

    def publish(self, topic: str, data: Any) -> None:
        """Set this rank's ``data`` (JSON) under ``topic``."""
        with self._reaching_the_store(topic):
            self.store.set(f"{topic}/{self.world.rank}", _pack(data))

    def read(self, topic: str, rank: int, since: float | None = None) -> Any:
        """What ``rank`` published under ``topic``; waits for it, until the timeout counted from ``since``.

        Raises:
            RefitTimeout: it does not come in time; names the rank that is late.
            PeerLost: another rank gave up meanwhile; says which and why.
        """
        key = f"{topic}/{rank}"
        self._wait(key, stage=topic, late=self.world.describe(rank), since=since)
        return self._get(key, topic)

    def vote(self, topic: str, data: Any) -> list[Any]:
        """Give ``data`` and get what all ranks gave, in the order of ranks. A barrier: nobody passes early.

        Trainer rank 0 collects and publishes, so that a vote costs two messages a rank.

        Raises:
            RefitTimeout: a rank's vote does not come in time.
            PeerLost: another rank gave up.
        """
        self.publish(topic, data)
        result = f"{topic}/result"
        if self.world.rank == 0:
            # One limit for all: the rank that is missing when it runs out is the one to name.
            since = time.monotonic()
            votes = [self.read(topic, rank, since) for rank in range(self.world.size)]
            with self._reaching_the_store(topic):
                self._close_vote(topic, votes)
            return votes
        self._wait(result, stage=topic, late=self.world.describe(0), grace=_COLLECTOR_GRACE)
        votes = self._get(result, topic)
        if not isinstance(votes, list) or len(votes) != self.world.size:
            raise RefitMismatch(
                f"the vote on {topic} has {len(votes)} answers for {self.world.size} ranks",
                stage=topic,
                rank=self.world.rank,
            )
        return votes

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one gives up, so that none waits for it."""
        try:
            self.store.set(_ABORT, _pack({"rank": self.world.rank, "reason": reason}))
        except (DistNetworkError, DistStoreError) as error:
            # The ranks that could read it lose the same store; the caller's own error matters more.
            logger.warning("could not tell the other ranks that this one gives up: %s", error)

    def check_abort(self, stage: str) -> None:
        """Raise PeerLost if a rank has given up."""
        if self._exists(_ABORT, stage):
            cause = self._get(_ABORT, stage)
            raise PeerLost(
                f"{self.world.describe(cause['rank'])} gave up: {cause['reason']}",
                stage=stage,
                rank=self.world.rank,
            )

    def _wait(
        self, key: str, *, stage: str, late: str, grace: float = 0.0, since: float | None = None
    ) -> None:
        start = time.monotonic() if since is None else since
        next_abort_check = start
        pause = _FIRST_PAUSE
        while not self._exists(key, stage):
            now = time.monotonic()
            if now >= next_abort_check:
                self.check_abort(stage)
                next_abort_check = now + _ABORT_CHECK_EVERY
            if now - start > self.timeout_s + grace:
                message = (
                    f"{late} did not answer within {self.timeout_s:.0f} s. It may be dead, busy with an earlier "
                    "request, or not called at all; raise policy.refit.timeout_s if it is only slow."
                )
                self.abort(message)
                raise RefitTimeout(message, stage=stage, rank=self.world.rank)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _close_vote(self, topic: str, votes: list[Any]) -> None:
        result = f"{topic}/result"
        self.store.set(result, _pack(votes))
        # Who votes now has read the last vote's result, so the store stays small for any number of refits.
        stale = [f"{topic}/{rank}" for rank in range(self.world.size)]
        for key in [*stale, self._last_result] if self._last_result else stale:
            self.store.delete_key(key)
        self._last_result = result

    def _exists(self, key: str, stage: str) -> bool:
        with self._reaching_the_store(stage):
            return self.store.check([key])

    def _get(self, key: str, stage: str) -> Any:
        with self._reaching_the_store(stage):
            return _unpack(self.store.get(key))

    @contextmanager
    def _reaching_the_store(self, stage: str) -> Iterator[None]:
        try:
            yield
        except (DistNetworkError, DistStoreError) as error:
            raise PeerLost(
                f"the rendezvous on trainer rank 0 went away: {error}", stage=stage, rank=self.world.rank
            ) from error


def _pack(data: Any) -> Any:
    """Compressed JSON. Typed loosely: the store takes bytes, which torch's stubs don't know."""
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)


def _unpack(raw: bytes) -> Any:
    return json.loads(zlib.decompress(raw))
