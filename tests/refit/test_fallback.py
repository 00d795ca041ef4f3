"""What serves under ``auto`` where the transport that it chose does not, or can't any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.engine import bulk, epoch_plan
from rlrefit.integration.errors import PeerLost, TransportUnavailable
from rlrefit.integration.plan import Plan
from rlrefit.integration.session import RefitSession
from rlrefit.integration.transport import P2PTransport, Transport, make_transport

from .synthetic import move, refit_changed, run_world, world

RANKS = 5


class OnceShareable(P2PTransport):
    """Moves bytes as ``p2p`` does, until one rank's storage is where its peers don't reach it."""

    name = "ipc"
    refuses = range(1, 9)
    asks = False  # whether all have to describe their storage once more at first

    def __init__(self, group: Group, rank: int, plan: Plan, verify: str):
        super().__init__(group, rank, plan, verify)
        self.bindings = 0

    def bind(self, fragments: Any) -> None:
        self.bindings += 1
        if self.rank == 1 and self.bindings in self.refuses:
            raise TransportUnavailable("the parameters lie in pageable memory", stage="bind", rank=self.rank)
        super().bind(fragments)

    def asks_again(self, described: Any) -> bool:
        return self.asks and self.bindings == 1


def make(
    transport: str,
    channel: Channel,
    choice: Any,
    device: torch.device,
    plan: Any,
    config: RefitConfig,
    **options: Any,
) -> Transport:
    if transport != "ipc":
        return make_transport(transport, channel, choice, device, plan, config, **options)
    rank = channel.world.rank
    group = TorchGroup.open(
        channel.store, "one-sided", rank, RANKS, device, channel.timeout_s, channel.check_abort
    )
    return OnceShareable(group, rank, plan, config.verify)


def four_refits(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
    found = []
    for version in range(1, 5):
        if rank == 1 and version == 3:
            move(endpoint)
        record, wrong = refit_changed(session, endpoint, version)
        found.append((record.transport, wrong, session.state.version))
    return found


def run(monkeypatch: pytest.MonkeyPatch, refuses: range, transport: str) -> list[Any]:
    """Four refits of all ranks, where rank 1 refuses these bindings."""
    monkeypatch.setattr(bulk, "make_transport", make)
    monkeypatch.setattr(epoch_plan, "choose", lambda *_: ("ipc", "the test says so"))
    monkeypatch.setattr(OnceShareable, "refuses", refuses)
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport=transport)
    return run_world(*world(RANKS - 2), four_refits, config)


@pytest.mark.parametrize(
    ("refuses", "carried_by"),
    [
        (range(1, 9), ["p2p"] * 4),
        (range(2, 9), ["ipc"] * 2 + ["p2p"] * 2),
        # For a moment only: what was bound once is tried twice.
        (range(2, 3), ["ipc"] * 4),
    ],
)
def test_auto_goes_on_over_p2p_when_a_rank_can_not_be_reached_any_more(
    monkeypatch: pytest.MonkeyPatch, refuses: range, carried_by: list[str]
) -> None:
    for rank, found in enumerate(run(monkeypatch, refuses, "auto")):
        assert [carrier for carrier, _, _ in found] == carried_by
        assert [wrong for _, wrong, _ in found] == [[]] * 4
        assert rank < 2 or [version for _, _, version in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(("refuses", "carrier"), [(range(0), "ipc"), (range(2, 9), "p2p")])
def test_what_shows_once_storage_was_described_is_followed_by_all_ranks_before_they_connect(
    monkeypatch: pytest.MonkeyPatch, refuses: range, carrier: str
) -> None:
    monkeypatch.setattr(OnceShareable, "asks", True)
    for found in run(monkeypatch, refuses, "auto"):
        assert [(name, wrong) for name, wrong, _ in found] == [(carrier, [])] * 4


def test_a_transport_that_was_asked_for_by_name_ends_the_refit_on_all_ranks_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = run(monkeypatch, range(2, 9), "ipc")
    assert all(isinstance(result, TransportUnavailable | PeerLost) for result in results)
    assert all("pageable memory" in str(result) for result in results)
