"""Refits that the receivers carry out: they map the senders' parameters, on one GPU that all share or each on its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ipc.worlds import Rank, Scenario, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return str(tmp_path / "meeting")


@pytest.mark.parametrize(
    ("sources", "destinations", "verify", "expandable"),
    [(2, 2, "full", False), (1, 2, "sampled", False), (2, 1, "off", True)],
)
def test_three_changed_refits_are_read_bit_for_bit(
    meeting: str, sources: int, destinations: int, verify: str, expandable: bool
) -> None:
    scenario = Scenario(
        meeting, sources, destinations, verify=verify, expandable=expandable, transport="pull", rows=20_000
    )
    for rank in run(scenario)[sources:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]
        for refit in rank["refits"]:
            verified, payload = refit["verified"], refit["payload"]
            assert {"full": verified == payload, "sampled": 0 < verified < payload, "off": not verified}[
                verify
            ]


def test_a_killed_sender_ends_in_a_typed_error_that_names_it_within_the_timeout(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="kill", timeout_s=3.0, transport="pull"))
    assert ranks[0] is None
    for rank in ranks[2:]:
        assert rank["ended"].startswith("RefitTimeout: refit rank 0 did not finish")
        assert 3.0 <= rank["seconds"] < 5.0


def test_a_killed_receiver_ends_in_a_typed_error_that_names_it_within_the_timeout(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="kill", victim=2, timeout_s=3.0, transport="pull"))
    assert ranks[2] is None
    for rank in ranks[:2]:
        assert rank["ended"].startswith("RefitTimeout: refit rank 2 did not finish")
    assert ranks[3]["ended"] == "done"


def test_a_checksum_that_differs_is_an_error_that_names_sender_and_weight(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="lie", transport="pull"))
    assert ranks[2]["ended"].startswith("VerificationError: what landed from refit rank 0")


def test_a_hundred_refits_leave_no_memory_and_no_descriptors(meeting: str) -> None:
    ranks = run(Scenario(meeting, 1, 1, times=100, verify="sampled", transport="pull"), 240.0)
    assert not any(refit["wrong"] for refit in ranks[1]["refits"])
    for rank in ranks:
        assert rank["resources"][-1] == rank["resources"][9]


def test_bytes_that_stay_on_the_gpu_move_at_80_percent_of_its_copy_rate(
    meeting: str, request: pytest.FixtureRequest
) -> None:
    rows = 4 << 20  # 2 GiB
    ranks = run(Scenario(meeting, 1, 1, times=5, verify="off", transport="pull", rows=rows))
    source = torch.empty(rows * 256, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        start.record()
        target.copy_(source)
        end.record()
    torch.cuda.synchronize()
    copy = source.nbytes / start.elapsed_time(end) * 1e3
    pulled = max(refit["payload"] / refit["seconds"] for refit in ranks[1]["refits"][1:])
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(f"\npulled at {pulled / 1e9:.0f} GB/s, {pulled / copy:.1%} of {copy / 1e9:.0f} GB/s")
    if torch.cuda.device_count() == 1:
        assert pulled / copy >= 0.8


def test_an_open_transport_does_not_keep_the_memory_of_parameters(meeting: str) -> None:
    scenario = Scenario(meeting, 1, 1, rows=200_000, transport="pull")
    ranks = [Rank(scenario, rank, torch.device("cuda", 0)) for rank in range(2)]
    transports = [rank.make_transport() for rank in ranks]
    for rank, transport in zip(ranks, transports, strict=True):
        transport.bind(rank.fragments())
    described = [transport.describe() for transport in transports]
    for transport in transports:
        transport.connect(described)
    held = torch.cuda.memory_allocated()
    for rank in ranks:
        rank.endpoint = None
    assert held - torch.cuda.memory_allocated() >= 2 * 200_000 * 256 * 2
    for transport in transports:
        transport.close()
