"""For how long a rank waits for its peers and its GPU, and until when a sender may begin to write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...comm.waiting import wait_until
from ...errors import PeerLost, RefitTimeout
from ...gpu_memory.driver import DriverError
from .signals import SignalBuffer


class Lease:
    """For how long a sender may begin to write: from the moment at which it says that it is ready for a refit.

    A sender that is held up afterwards (stopped, swapped out) would wake into a world whose receivers have timed
    out, and may have been refitted by others meanwhile: its late writes would put old weights into an engine that
    serves. Receivers wait at least as long as a lease runs, since they begin to wait later, and it runs for the
    shortest time that any of them waits.
    """

    def __init__(self, limit_s: float):
        """Make one that has yet to be renewed.

        Args:
            limit_s: for how long it runs, in seconds: no longer than any receiver waits.
        """
        self._limit = limit_s
        self._since: float | None = None

    def renew(self) -> None:
        """This rank is ready, and no refit has begun."""
        self._since = time.monotonic()

    def use(self, rank: int) -> None:
        """Begin to write; a lease serves one refit.

        Raises:
            RefitTimeout: it ran out, or there is none. Nothing was written.
        """
        since, self._since = self._since, None
        held = float("inf") if since is None else time.monotonic() - since
        if held > self._limit:
            raise RefitTimeout(
                f"this rank began to write {held:.0f} s after it was ready for the refit, and within {self._limit:.0f} s its "
                "peers give up: late writes would damage engines that serve again. Nothing was written. Was the process "
                "stopped, or starved of CPU time?",
                stage="transfer",
                rank=rank,
            )


class Waits:
    """The waits of one rank, each within the same limit and with a look at the other ranks."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        describe_rank: Callable[[int], str],
    ):
        """
        Args:
            rank: of the refit world.
            device: of the parameters.
            timeout_s: limit of any wait, in seconds.
            watch: called with the stage now and then; raises if another rank has given up.
            describe_rank: what a user calls a rank.
        """
        self._rank = rank
        self._device = device
        self._timeout = timeout_s
        self._watch = watch
        self._who = describe_rank

    def until(self, done: Callable[[], bool], stage: str, late: Callable[[], str]) -> None:
        """Wait until ``done``; ``late`` says who or what is waited for.

        Raises:
            RefitTimeout: the limit has passed.
            RefitError: another rank has given up.
        """

        def timed_out() -> RefitTimeout:
            return RefitTimeout(
                f"{late()} did not finish within {self._timeout:.0f} s; dead, stuck, or late. Raise "
                "policy.refit.timeout_s if it is only slow",
                stage=stage,
                rank=self._rank,
            )

        wait_until(done, self._timeout, stage, self._watch, timed_out)

    def for_signals(self, signals: SignalBuffer, number: int, stage: str) -> None:
        """Wait until all peers have signalled ``number`` or a later one; raises as :meth:`until`."""
        late = signals.peers

        def all_signalled() -> bool:
            nonlocal late
            missing_now = signals.missing(number)
            late = late if missing_now is None else missing_now
            return missing_now == []

        self.until(all_signalled, stage, lambda: ", ".join(map(self._who, late)))

    def for_earlier_work(self, stage: str) -> None:
        """Wait until this rank's GPU has done what was enqueued on the current stream; raises as :meth:`until`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self.until(event.query, stage, lambda: "this rank's earlier work on its GPU")


@contextmanager
def gpu_errors(rank: int) -> Iterator[None]:
    """An error of the GPU inside usually means that a peer is gone; nothing works in this process after it.

    Raises:
        PeerLost: in its place.
    """
    try:
        yield
    except (torch.AcceleratorError, DriverError) as error:
        raise PeerLost(
            f"the GPU failed while it wrote or read its peers' memory, or read what they wrote: {error}. A peer may have "
            "freed its parameters during the refit. This process's CUDA context can't be used any more; restart it",
            stage="transfer",
            rank=rank,
        ) from error
