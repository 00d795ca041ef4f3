"""The wait that all ranks wait by."""

from __future__ import annotations

import pytest

from rlrefit.integration.comm.waiting import wait_until
from rlrefit.integration.errors import PeerLost, RefitTimeout


def late() -> RefitTimeout:
    return RefitTimeout("nothing came", stage="misc", rank=0)


def test_a_rank_that_gave_up_is_the_cause_though_the_time_is_up_before_the_next_look_at_it() -> None:
    def watch(stage: str) -> None:
        raise PeerLost("trainer rank 3 gave up", stage=stage)

    with pytest.raises(PeerLost) as raised:
        wait_until(lambda: False, 0.05, "misc", watch, late)
    assert raised.value.stage == "misc"


def test_where_nobody_gave_up_the_wait_ends_with_its_own_error() -> None:
    looked: list[str] = []
    with pytest.raises(RefitTimeout):
        wait_until(lambda: False, 0.05, "misc", looked.append, late)
    assert looked == ["misc"]
