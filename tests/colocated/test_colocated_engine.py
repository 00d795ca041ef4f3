"""The checkpoint engine ``colocated_ipc`` on CPUs: whole refits through memory that the ranks share."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, VerificationError
from rlrefit.integration.gpu_memory import availability
from rlrefit.integration.quantize.formats import Format
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from tests.quantize import test_quantized_refit as quantized
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed, run_world, whole
from tests.refit.test_killed_peer import kill_a_rank
from tests.refit.test_session import refit_versions, world
from tests.spawn import run_ranks

from .worlds import left_behind, many_refits, nothing_left

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


@pytest.mark.parametrize(("transport", "carries"), [("auto", "buckets"), ("golden", "golden")])
def test_three_changed_refits_land_bit_for_bit_and_commit(transport: str, carries: str) -> None:
    before = left_behind()
    sources, destinations = world()
    config = RefitConfig(transport=transport, bucket_mb=1, timeout_s=20.0, verify="full")
    results = run_world(sources, destinations, refit_versions(1, 2, 3), config, "colocated_ipc")
    for result in results[2:]:
        assert [(wrong, version) for _, wrong, version in result] == [([], 1), ([], 2), ([], 3)]
        assert {record.transport for record, _, _ in result} == {carries}
        assert all(record.bytes_misc > 0 and record.bytes_verified > 0 for record, _, _ in result)
    assert nothing_left(before)


def test_the_engine_says_what_carries_the_bytes_and_holds_the_misc_paths_buckets() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> tuple[str, int]:
        engine = session.engine
        return str(engine.transport_reason), engine.held_bytes - engine._open_bulk.staging_bytes

    told = run_world(*world(), body, CONFIG, "colocated_ipc")
    assert all("refit rank 0 can't map GPU memory" in reason for reason, _ in told)
    # Trainer rank 1 has no part in the broadcast.
    assert [nbytes > 0 for _, nbytes in told] == [True, False, True, True, True]


def test_fewer_bytes_on_the_misc_path_than_ranks_have_a_bucket_all_the_same() -> None:
    specs = [TensorSpec("w", (8, 10), torch.bfloat16), TensorSpec("router", (), torch.float32)]
    source = SyntheticSource(specs, whole(specs), {"router": "MoE router"})
    engines = [SyntheticDestination(specs, whole(specs)) for _ in range(6)]
    results = run_world([source], engines, refit_versions(1, 2), CONFIG, "colocated_ipc")
    assert [[wrong for _, wrong, _ in result] for result in results[1:]] == [[[], []]] * 6


def test_float8_and_a_tensor_larger_than_a_bucket_arrive_and_damage_on_the_way_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [
        TensorSpec("large", (3 << 10, 1 << 10), torch.bfloat16),
        TensorSpec("f8", (512, 8), torch.float8_e4m3fn),
    ]
    boxes = {"large": [((0, 3 << 10), (0, 1 << 10))], "f8": [((0, 512), (0, 8))]}
    ends = [SyntheticSource(specs, boxes)], [SyntheticDestination(specs, boxes)]

    def body(rank: int, session: RefitSession, endpoint: Any) -> None:
        for version in (1, 2):
            record, wrong = refit_changed(session, endpoint, version)
            assert (wrong, record.bytes_misc) == ([], 0)
        group: Any = session.engine._open_bulk._transport.group  # type: ignore[attr-defined]
        if rank == 0:
            link = group.link(1, 0)
            filled = link.filled

            def damage() -> None:
                link._outgoing[link._filled % 2][100] ^= 1
                filled()

            monkeypatch.setattr(link, "filled", damage)
        refit_changed(session, endpoint, 3)

    sender, receiver = run_world(*ends, body, CONFIG, "colocated_ipc")
    assert isinstance(receiver, VerificationError)
    assert isinstance(sender, PeerLost)


def test_quantized_weights_of_float8_go_through() -> None:
    formats: dict[str, Format] = {spec.name: quantized.FP8 for spec in quantized.QUANTIZED}
    for cut in (quantized.by_columns, quantized.by_rows):
        results = run_world(
            quantized.sources(),
            quantized.wanted(formats, cut),
            lambda rank, session, end: [refit_changed(session, end, version)[1] for version in (1, 2, 3)],
            quantized.config(transport="auto"),
            "colocated_ipc",
        )
        assert results == [[[], [], []]] * 4


def test_ranks_on_other_hosts_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = itertools.cycle(["here", "there"])
    monkeypatch.setattr(availability, "host_identity", lambda: next(names))
    results = run_world(*world(), lambda *_: None, CONFIG, "colocated_ipc")
    assert all(isinstance(result, RefitError) for result in results)
    assert all("Use the engine nccl_xfer" in str(result) for result in results)


def test_a_hundred_refits_between_processes_land_and_leave_no_descriptor_no_mapping_and_no_memory() -> None:
    for rank in run_ranks(many_refits, 3, 100):
        assert rank["wrong"] == []
        assert rank["transport"] == "buckets"
        early, late = rank["descriptors"]
        assert late <= early
        assert rank["grown"] < 2 << 20
        assert rank["mapped"] > 0
        assert rank["left"]


@pytest.mark.parametrize("killed", [2, 0])
def test_the_death_of_a_rank_ends_the_refit_on_all_others_at_once(killed: int) -> None:
    kill_a_rank("transfer", on_gpu=False, killed=killed, engine="colocated_ipc")
