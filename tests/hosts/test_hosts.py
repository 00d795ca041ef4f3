"""Refits over two hosts that share nothing but a network: namespaces of this machine, where it makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rlrefit.integration.errors import PeerLost, RefitTimeout

from .crew import Crew, crew_of
from .namespaces import Cluster, Host, cluster, refused
from .ranks import ENGINES, TRAINERS, Ended, Refitted, Way, refit_across_a_fault, refit_twice

SIZE = TRAINERS + ENGINES
P2P, GOLDEN, AUTO = Way("nccl_xfer", "p2p"), Way("nccl_xfer", "golden"), Way("nccl_xfer", "auto")
BROADCAST, SHARED_MEMORY = Way("packed_broadcast", "auto"), Way("colocated_ipc", "auto")
# Of refits that go wrong: it is waited for.
SHORT_S, LONG_S = 3.0, 60.0


@pytest.fixture(scope="module")
def network() -> Iterator[Cluster]:
    reason = refused()
    if reason:
        pytest.skip(reason)
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def hosts(network: Cluster) -> tuple[Host, Host]:
    """Two hosts whose names nothing resolves."""
    return network.host("a", {"eth0": "10.77.0.1/24"}), network.host("b", {"eth0": "10.77.0.2/24"})


def hand_on(crew: Crew, told: dict[str, Any] | None = None) -> None:
    """Hand rank 0's rendezvous, or another one, to all ranks, as a launcher does."""
    opened = crew.hear(0)
    for rank in range(SIZE):
        crew.tell(rank, opened if told is None else opened | told)


def refits(
    hosts: Sequence[Host],
    address: str,
    *ways: Way,
    timeout_s: float = LONG_S,
    env: dict[str, str] | None = None,
    told: dict[str, Any] | None = None,
) -> list[list[Refitted | Ended]]:
    """What each rank saw of each way, by way."""
    with crew_of(refit_twice, hosts, address, [*ways], timeout_s, env=env) as crew:
        for _ in ways:
            hand_on(crew, told)
        by_rank = crew.hear_all(LONG_S)
    return [list(seen) for seen in zip(*by_rank, strict=True)]


def require_right(seen: Sequence[Refitted | Ended], transport: str) -> None:
    for one in seen:
        assert isinstance(one, Refitted), one
        assert one.wrong == []
        assert one.record.transport == transport
        assert one.record.bytes_verified > 0 or one.record.role == "trainer"


@pytest.mark.parametrize("order", ["aabb", "abab"], ids=["a side on each host", "both sides over both hosts"])
def test_refits_over_two_hosts_are_right_whichever_host_a_rank_is_on(
    order: str, hosts: tuple[Host, Host]
) -> None:
    placed = [hosts["ab".index(letter)] for letter in order]
    p2p, golden, auto, broadcast, shared = refits(
        placed, hosts[0].address, P2P, GOLDEN, AUTO, BROADCAST, SHARED_MEMORY
    )
    require_right(p2p, "p2p")
    require_right(golden, "golden")
    require_right(auto, "p2p")
    require_right(broadcast, "broadcast")
    for one in shared:
        assert isinstance(one, Ended)
        assert one.error.stage == "handshake"
        assert one.seconds < LONG_S / 2


def test_containers_of_one_machine_with_the_same_name_are_told_apart_by_their_networks(
    network: Cluster,
) -> None:
    a, b = (
        network.host(f"twin{number}", {"eth0": f"10.77.0.1{number}/24"}, hostname="twin") for number in (0, 1)
    )
    p2p, shared = refits([a, b, a, b], a.address, AUTO, SHARED_MEMORY)
    require_right(p2p, "p2p")
    for one in shared:
        assert isinstance(one, Ended)
        assert one.error.stage == "handshake"
        assert one.seconds < LONG_S / 2


def test_hosts_with_addresses_of_ipv6_alone_refit(network: Cluster) -> None:
    a, b = (network.host(f"six{number}", {"eth0": f"fd77::{number}/64"}) for number in (1, 2))
    require_right(refits([a, b, a, b], a.address, P2P)[0], "p2p")


def test_hosts_with_networks_that_others_do_not_have_are_reached_at_the_address_that_ranks_were_given(
    network: Cluster,
) -> None:
    # Their names lead to these networks.
    a, b = (
        network.host(
            f"two{number}",
            {"eth0": f"10.{own}.0.{number}/24", "eth1": f"10.77.0.3{number}/24"},
            network={"eth0": f"own{number}"},
            known={f"10.{own}.0.{number}": [f"two{number}"]},
        )
        for number, own in ((1, 88), (2, 99))
    )
    require_right(refits([a, b, a, b], "10.77.0.31", P2P)[0], "p2p")
    # What the user says of gloo goes first.
    given = {"GLOO_SOCKET_IFNAME": "eth0"}
    for one in refits([a, b, a, b], "10.77.0.31", P2P, timeout_s=SHORT_S, env=given)[0]:
        assert isinstance(one, Ended)
        assert isinstance(one.error, (PeerLost, RefitTimeout))
        assert "GLOO_SOCKET_IFNAME" in str(one.error)
    told = refits([a, b, a, b], a.address, P2P, timeout_s=SHORT_S)[0]
    for one in (told[1], told[3]):
        assert isinstance(one, Ended)
        assert isinstance(one.error, RefitTimeout)
        assert one.error.blamed == 0
        assert a.address in str(one.error)


@pytest.mark.parametrize("name", ["nowhere", "127.0.0.1"])
def test_ranks_that_are_given_a_name_or_address_that_leads_nowhere_say_so(
    name: str, hosts: tuple[Host, Host]
) -> None:
    a, b = hosts
    seen = refits([a, a, b, b], a.address, P2P, timeout_s=SHORT_S, told={"host": name})[0]
    for one in seen[2:]:
        assert isinstance(one, Ended)
        assert isinstance(one.error, RefitTimeout)
        assert one.error.stage == "rendezvous"
        assert name in str(one.error)


@pytest.mark.parametrize("fault", ["the link goes down", "a host goes"])
def test_a_fault_of_the_network_in_the_middle_of_a_refit_ends_it_on_all_ranks_and_a_new_epoch_heals_it(
    fault: str, network: Cluster, hosts: tuple[Host, Host]
) -> None:
    a, b = hosts
    with crew_of(refit_across_a_fault, [a, a, b, b], a.address, SHORT_S) as crew:
        hand_on(crew)
        assert crew.hear(0) == "in the middle"
        assert [crew.hear(rank) for rank in (1, 2, 3)] == ["ready"] * 3
        if fault == "a host goes":
            crew.kill_on(b)
        else:
            network.pull(b)
        crew.tell(0)
        living = (0, 1) if fault == "a host goes" else (0, 1, 2, 3)
        ended = {rank: crew.hear(rank) for rank in living}
        for rank, one in ended.items():
            assert isinstance(one.error, (PeerLost, RefitTimeout)), one
            assert one.dirty == (rank >= TRAINERS)
            assert one.seconds < 5 * SHORT_S
        for rank in (0, 1):
            # One rank alone can be blamed, but all are named.
            assert ended[rank].error.blamed in (-1, 2, 3)
            assert b.address in str(ended[rank].error)
        for rank in {2, 3} & {*living}:
            assert ended[rank].error.blamed == 0
            assert a.address in str(ended[rank].error)
        if fault == "a host goes":
            return
        network.plug_again(b)
        for rank in living:
            crew.tell(rank)
        hand_on(crew)
        require_right(crew.hear_all(LONG_S), "p2p")
