"""Until when a sender may begin to write."""

from __future__ import annotations

import time

from ...errors import RefitTimeout


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
