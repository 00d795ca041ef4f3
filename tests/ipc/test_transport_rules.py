"""Where ipc can serve and where it says why not."""

from __future__ import annotations

import json
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
from tests.refit.synthetic import pair, refit_changed, run_world

GPU = GpuFacts("a/1", "", "GPU-0", visible=("GPU-0", "GPU-1"), reaches=("GPU-0", "GPU-1"))
OTHER = replace(GPU, device="GPU-1")


@pytest.mark.parametrize(
    ("told", "able", "reason"),
    [
        ([GPU, OTHER], True, "one host"),
        ([GPU, replace(OTHER, host="b/1")], False, "2 hosts"),
        (
            [replace(GPU, reaches=("GPU-0",)), OTHER],
            False,
            "refit rank 0 can't reach the GPU of refit rank 1",
        ),
        ([GPU, GpuFacts("a/1", "its parameters are not on a GPU")], False, "refit rank 1: its parameters"),
        ([facts(torch.device("cpu"))] * 2, False, "refit rank 0: its parameters are not on a GPU"),
        # One that the sender does not see is left to the attempt.
        ([replace(GPU, visible=("GPU-0",), reaches=("GPU-0",)), OTHER], True, ""),
        # A receiver need not reach its senders.
        ([GPU, replace(OTHER, reaches=("GPU-1",))], True, ""),
    ],
)
def test_ipc_joins_gpus_of_one_host_that_senders_reach_and_names_the_ranks_that_it_can_not_join(
    told: list[Any], able: bool, reason: str
) -> None:
    assert availability(told, 1)[0] is able
    assert reason in availability(told, 1)[1]
    assert choose("auto", told, 1)[0] == ("ipc" if able else "p2p")
    assert able or reason in choose("auto", told, 1)[1]


@pytest.mark.parametrize(
    "told",
    [None, [], {}, {"host": "a/1"}, {**asdict(GPU), "reaches": "GPU-0"}, {**asdict(GPU), "host": 1}],
)
def test_what_a_peer_tells_of_its_gpu_is_not_trusted(told: Any) -> None:
    with pytest.raises(Malformed):
        decode(GpuFacts, told)


def test_what_a_rank_tells_of_its_gpu_survives_json() -> None:
    assert decode(GpuFacts, json.loads(json.dumps(asdict(GPU)))) == GPU


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


SPECS = [TensorSpec("w", (8, 4), torch.float32)]


def open_on_cpus(transport: str) -> list[Any]:
    def body(rank: int, session: Any, endpoint: Any) -> Any:
        return refit_changed(session, endpoint, 1), session.engine.transport_reason

    return run_world(*pair(SPECS), body, RefitConfig(bucket_mb=1, timeout_s=20.0, transport=transport))


def test_a_session_between_cpus_fails_over_ipc_on_all_ranks_and_takes_p2p_under_auto_with_the_reason() -> (
    None
):
    for error in open_on_cpus("ipc"):
        assert isinstance(error, TransportUnavailable)
        assert "not on a GPU" in str(error)
    for (record, wrong), reason in open_on_cpus("auto"):
        assert (record.transport, wrong) == ("p2p", [])
        assert "refit rank 0: its parameters are not on a GPU" in reason


def test_memory_that_moved_under_its_addresses_on_one_rank_is_bound_anew_on_all() -> None:
    def body(rank: int, session: Any, endpoint: Any) -> Any:
        bulk = session.engine._bulk
        counts = []
        for version, moved in [(1, False), (2, True), (3, False)]:
            bulk._transport.moved = lambda moved=moved: moved and rank == 1
            assert refit_changed(session, endpoint, version)[1] == []
            counts.append(bulk._bindings)
        return counts

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, transport="p2p")
    assert run_world(*pair(SPECS), body, config) == [[1, 2, 2]] * 2


def test_a_plan_with_relays_is_refused() -> None:
    relayed = replace(PLAN, receives=((replace(MESSAGE, source=2),),))
    with pytest.raises(PlanError, match="without fan-out"):
        transport(relayed)
