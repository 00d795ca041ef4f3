"""Where ipc can serve and where it says why not."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control.decoding import decode
from rlrefit.integration.control.frames import Malformed
from rlrefit.integration.errors import PlanError, TransportUnavailable
from rlrefit.integration.gpu_memory.availability import GpuFacts, availability, facts
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.transport import IpcTransport, choose
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed, run_world

GPU = GpuFacts("a/1", "", "GPU-0", visible=("GPU-0", "GPU-1"), reaches=("GPU-0", "GPU-1"))
OTHER = replace(GPU, device="GPU-1")


def test_gpus_of_one_host_that_reach_each_other_can_be_joined() -> None:
    able, reason = availability([GPU, OTHER], 1)
    assert able
    assert "one host" in reason


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([GPU, replace(OTHER, host="b/1")], "2 hosts"),
        ([replace(GPU, reaches=("GPU-0",)), OTHER], "refit rank 0 can't reach the GPU of refit rank 1"),
        ([GPU, GpuFacts("a/1", "its parameters are not on a GPU")], "refit rank 1: its parameters"),
    ],
)
def test_ranks_that_can_not_be_joined_are_named_with_the_reason(told: list[Any], reason: str) -> None:
    able, why = availability(told, 1)
    assert not able
    assert reason in why


def test_a_gpu_that_the_sender_does_not_see_is_left_to_the_attempt() -> None:
    hidden = replace(GPU, visible=("GPU-0",), reaches=("GPU-0",))
    assert availability([hidden, OTHER], 1)[0]


def test_a_receiver_need_not_reach_its_senders() -> None:
    assert availability([GPU, replace(OTHER, reaches=("GPU-1",))], 1)[0]


def test_a_rank_on_a_cpu_says_so() -> None:
    told = facts(torch.device("cpu"))
    assert availability([told, told], 1) == (False, "refit rank 0: its parameters are not on a GPU")


@pytest.mark.parametrize(
    "told",
    [None, [], {}, {"host": "a/1"}, {**asdict(GPU), "reaches": "GPU-0"}, {**asdict(GPU), "host": 1}],
)
def test_what_a_peer_tells_of_its_gpu_is_not_trusted(told: Any) -> None:
    with pytest.raises(Malformed):
        decode(GpuFacts, told)


def test_what_a_rank_tells_of_its_gpu_survives_json() -> None:
    assert decode(GpuFacts, json.loads(json.dumps(asdict(GPU)))) == GPU


def test_auto_takes_ipc_where_it_can_work_and_else_p2p_and_says_why() -> None:
    assert choose("auto", [GPU, OTHER], 1)[0] == "ipc"
    name, reason = choose("auto", [GPU, replace(OTHER, host="b/1")], 1)
    assert name == "p2p"
    assert "2 hosts" in reason
    assert choose("golden", [], 1)[0] == "golden"


def transport(plan: Plan) -> IpcTransport:
    return IpcTransport(1, plan, "full", torch.device("cpu"), 1.0, lambda stage: None, str)


MESSAGE = Message(0, 1, 0, (Segment("w", ((0, 4),), 0, 8),), 32, 0)
PLAN = Plan(1, ((),), ((MESSAGE,),), "digest", {})


def test_parameters_on_a_cpu_are_refused_when_it_binds_and_it_closes_all_the_same() -> None:
    one = transport(PLAN)
    with pytest.raises(TransportUnavailable, match="not on a GPU"):
        one.bind([])
    one.close()
    one.close(failed=True)


def open_on_cpus(transport: str) -> list[Any]:
    specs = [TensorSpec("w", (8, 4), torch.float32)]
    box = {"w": [((0, 8), (0, 4))]}
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, transport=transport)

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        return refit_changed(session, endpoint, 1), session.engine.transport_reason

    return run_world([SyntheticSource(specs, box)], [SyntheticDestination(specs, box)], body, config)


def test_a_session_over_ipc_between_cpus_fails_on_all_ranks_with_the_reason() -> None:
    for error in open_on_cpus("ipc"):
        assert isinstance(error, TransportUnavailable)
        assert "not on a GPU" in str(error)


def test_a_session_under_auto_between_cpus_takes_p2p_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    why = "auto: not ipc, since refit rank 0: its parameters are not on a GPU"
    with caplog.at_level(logging.INFO):
        opened = open_on_cpus("auto")
    for (record, wrong), reason in opened:
        assert record.transport == "p2p"
        assert wrong == []
        assert why in reason
    assert f"nccl_xfer over p2p ({why}" in caplog.text


def test_memory_that_moved_under_its_addresses_on_one_rank_is_bound_anew_on_all() -> None:
    specs = [TensorSpec("w", (8, 4), torch.float32)]
    box = {"w": [((0, 8), (0, 4))]}

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        bulk = session.engine._bulk
        counts = []
        for version, moved in [(1, False), (2, True), (3, False)]:
            bulk._transport.moved = lambda moved=moved: moved and rank == 1
            assert refit_changed(session, endpoint, version)[1] == []
            counts.append(bulk._bindings)
        return counts

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, transport="p2p")
    ends = run_world([SyntheticSource(specs, box)], [SyntheticDestination(specs, box)], body, config)
    assert ends == [[1, 2, 2]] * 2


def test_a_plan_with_relays_is_refused() -> None:
    relayed = replace(PLAN, receives=((replace(MESSAGE, source=2),),))
    with pytest.raises(PlanError, match="without fan-out"):
        transport(relayed)
