"""A sender that was held up does not write into engines that gave it up."""

from __future__ import annotations

import pytest

from rlrefit.integration.errors import RefitTimeout
from rlrefit.integration.transport.ipc import transport as module
from rlrefit.integration.transport.ipc.transport import Lease


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_lease_serves_one_refit_within_its_time(clock: Clock) -> None:
    lease = Lease(10.0)
    for _ in range(2):
        lease.renew()
        clock.now += 9.9
        lease.use(0)
    with pytest.raises(RefitTimeout):
        lease.use(0)


def test_a_sender_that_was_held_up_is_told_that_its_peers_may_have_given_up(clock: Clock) -> None:
    lease = Lease(10.0)
    lease.renew()
    clock.now += 10.1
    with pytest.raises(RefitTimeout, match=r"late writes.*rank 3"):
        lease.use(3)


def test_a_renewed_lease_runs_anew(clock: Clock) -> None:
    lease = Lease(10.0)
    lease.renew()
    clock.now += 8
    lease.renew()
    clock.now += 8
    lease.use(0)
