"""The p2p transport over gloo: any layout, relays, messages without staging, sampled checks, damage, rebinding."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration.comm.group import Group, PeerBuffer
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.errors import (
    PeerLost,
    PlanError,
    RefitError,
    RefitMismatch,
    RefitTimeout,
    VerificationError,
)
from rlrefit.integration.plan import GLOO_PACE, NCCL_PACE, Message, Pace, Plan, Segment
from rlrefit.integration.transport.bound_plan import share_buckets
from rlrefit.integration.transport.messages import LocalMessages
from rlrefit.integration.weights.manifest import TensorSpec
from tests.p2p.worlds import Rank, Setting, contiguous, run_threads, run_well
from tests.plan.worlds import Layouts, layouts
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, move, pair, whole

MIB = 1 << 20


# For tiny weights: bare messages beside framed ones, buckets that come round, rounds ahead of what is unpacked.
TINY_PACE = Pace(alone=200, most=400, buckets=3, ahead=4)


def refit_versions(*versions: int) -> Any:
    return lambda rank: [rank.refit(version) for version in versions]


@given(
    layouts(max_ranks=3),
    st.sampled_from([512, 4096]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([NCCL_PACE, GLOO_PACE, TINY_PACE]),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_lands_bit_for_bit_with_and_without_relays_and_gaps_in_any_number_of_lanes(
    world: Layouts, bucket_bytes: int, fan_out: bool, lanes: int, pace: Pace, gaps: list[bool]
) -> None:
    # Bytes have no NaN to start from.
    specs = [s._replace(dtype=torch.float32) if s.dtype == torch.uint8 else s for s in world.specs]
    sources = [SyntheticSource(specs, held) for held in world.sources]
    destinations = [SyntheticDestination(specs, wanted) for wanted in world.destinations]
    for endpoint, has_gaps in zip((*sources, *destinations), gaps, strict=False):
        if not has_gaps:
            contiguous(endpoint)
    # Each of the buckets as large as with NCCL, so that every peer has room for one element.
    bucket_bytes *= pace.buckets // NCCL_PACE.buckets
    setting = Setting(bucket_bytes, lanes, "full", fan_out, pace=pace)
    results = run_well(specs, sources, destinations, refit_versions(1, 2), setting)
    assert [wrong for rank in results for _, wrong in rank] == [[]] * len(results) * 2


def replicas(shape: tuple[int, int], count: int, trainers: int, engines: int) -> tuple[Any, Any, Any]:
    """Weights cut by rows over the trainers, whole on every engine rank."""
    specs = [TensorSpec(f"w{i}", shape, torch.bfloat16) for i in range(count)]
    rows = shape[0] // trainers
    sources = [
        SyntheticSource(specs, {s.name: [((r * rows, (r + 1) * rows), (0, shape[1]))] for s in specs})
        for r in range(trainers)
    ]
    return specs, sources, [SyntheticDestination(specs, whole(specs)) for _ in range(engines)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_engines_that_want_the_same_pass_it_on_and_every_message_gets_its_turn_to_be_checked(
    lanes: int,
) -> None:
    specs, sources, destinations = replicas((64, 96), 12, trainers=2, engines=3)

    def body(rank: Rank) -> Any:
        relays = sum(m.is_relay for messages in rank.plan.sends for m in messages)
        turns = max((of for _, of in rank.transport._messages.turns.values()), default=1)
        return relays, turns, [rank.refit(version) for version in range(1, 13)]

    setting = Setting(bucket_bytes=24_000, lanes=lanes, verify="sampled", fan_out=True)
    results = run_well(specs, sources, destinations, body, setting)
    engines = results[2:]
    assert all(relays > 0 for relays, _, _ in engines)
    kept = sum(s.nbytes for s in specs)
    for _, turns, refits in engines:
        assert turns <= 12
        assert all(wrong == [] for _, wrong in refits)
        assert all(result.payload_bytes > kept for result, _ in refits)  # and what it passed on
        assert all(result.verified_bytes > 0 for result, _ in refits)
        assert sum(result.verified_bytes for result, _ in refits[:turns]) >= kept


def large(*, gaps_in: str = "") -> tuple[Any, Any, Any]:
    """Two weights of 2 MiB from one trainer to one engine; ``gaps_in`` one side's storage or none's."""
    specs = [TensorSpec(f"w{i}", (2048, 512), torch.bfloat16) for i in range(2)]
    sources, destinations = pair(specs)
    for side, endpoint in (("trainer", sources[0]), ("engine", destinations[0])):
        if gaps_in != side:
            contiguous(endpoint)
    return specs, sources, destinations


@pytest.mark.parametrize("gaps_in", ["", "trainer", "engine"])
def test_large_messages_are_staged_only_at_the_end_that_has_gaps_and_a_byte_that_the_wire_changes_is_caught(
    gaps_in: str,
) -> None:
    def body(rank: Rank) -> Any:
        refits = [rank.refit(version) for version in (1, 2)]
        bound: Any = rank.transport._bound
        last = bound.rounds[-1].exchange
        receive = last.finish

        def finish(stage: str) -> None:
            receive(stage)
            last._receives[0].buffer[4567] ^= 1

        damaged = None
        if rank.rank == 1:
            last.finish = finish
            with pytest.raises(VerificationError) as caught:
                rank.refit(3)
            damaged = str(caught.value)
        else:
            rank.refit(3)
        return rank.transport.staging_bytes, refits, damaged

    setting = Setting(bucket_bytes=8 * MIB, verify="full", pace=GLOO_PACE)
    results = run_well(*large(gaps_in=gaps_in), body, setting)
    for side, (staging, refits, _) in zip(("trainer", "engine"), results, strict=True):
        assert (staging > 0) == (side == gaps_in)
        assert staging <= 2 * setting.bucket_bytes
        assert all(wrong == [] for _, wrong in refits)
    assert all(result.verified_bytes == 4 * MIB for result, _ in results[1][1])
    assert "w1" in results[1][2]


def test_every_weight_that_lands_without_staging_gets_its_turn_to_be_checked() -> None:
    specs, sources, destinations = replicas((1024, 1024), 3, trainers=1, engines=1)
    for endpoint in (*sources, *destinations):
        contiguous(endpoint)
    setting = Setting(bucket_bytes=16 * MIB, verify="sampled", pace=GLOO_PACE)
    results = run_well(specs, sources, destinations, refit_versions(1, 2, 3), setting)
    for result, wrong in results[1]:
        assert wrong == []
        assert result.payload_bytes == 3 * result.verified_bytes == 6 * MIB


def test_rounds_are_on_the_wire_before_earlier_ones_are_unpacked_and_staging_stays_within_its_limit() -> None:
    specs, sources, destinations = replicas((1024, 1024), 12, trainers=1, engines=1)
    contiguous(sources[0])
    for key, view in sorted(destinations[0]._wanted.items())[::2]:
        destinations[0]._wanted[key] = view.contiguous()

    def body(rank: Rank) -> Any:
        bound: Any = rank.transport._bound
        acts: list[tuple[str, int]] = []
        for index, exchange in enumerate(one.exchange for one in bound.rounds):
            for name in ("start", "finish"):
                setattr(exchange, name, _noting(getattr(exchange, name), acts, (name, index)))
        return rank.transport.staging_bytes, [rank.refit(version) for version in (1, 2)], acts

    setting = Setting(bucket_bytes=4 * MIB, pace=GLOO_PACE)
    results = run_well(specs, sources, destinations, body, setting)
    for staging, refits, _ in results:
        assert staging <= 2 * setting.bucket_bytes
        assert all(wrong == [] for _, wrong in refits)
    acts = results[1][2]
    assert max(acts.index(("finish", i)) - acts.index(("start", i)) for i in range(12)) > 2
    assert all(acts.count((name, i)) == 2 for name in ("start", "finish") for i in range(12))


def _noting(call: Any, acts: list[Any], act: Any) -> Any:
    def noted(stage: str) -> None:
        acts.append(act)
        call(stage)

    return noted


@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_message_in_the_place_of_another_one_or_from_an_earlier_refit_is_caught(
    verify: str, earlier: bool
) -> None:
    # Whole messages, with the checksums that they carry: each agrees with itself.
    specs = [TensorSpec(f"w{i}", (32, 64), torch.bfloat16) for i in range(4)]
    sources = [SyntheticSource(specs, whole(specs[:2])), SyntheticSource(specs, whole(specs[2:]))]
    destinations = [SyntheticDestination(specs, whole(specs))]

    def body(rank: Rank) -> Any:
        bound = rank.transport._bound
        assert bound is not None
        exchange = bound.rounds[0].exchange
        buffers = [parcel.buffer for parcel in exchange._receives]
        rank.refit(1)
        if rank.rank == 2:
            assert len(buffers) == 2
            assert buffers[0].shape == buffers[1].shape
            assert len(bound.rounds) == 1
            arrived = [buffer.clone() for buffer in buffers]
            receive = exchange.finish

            def finish(stage: str) -> None:
                receive(stage)
                found = arrived if earlier else [buffer.clone() for buffer in buffers][::-1]
                for buffer, other in zip(buffers, found, strict=True):
                    buffer.copy_(other)

            exchange.finish = finish  # type: ignore[method-assign]
        return rank.refit(2)

    results = run_threads(specs, sources, destinations, body, Setting(bucket_bytes=1 << 20, verify=verify))
    assert isinstance(results[2], VerificationError)


def test_storage_that_moved_is_bound_again_with_the_same_buckets() -> None:
    specs, sources, destinations = replicas((64, 96), 4, trainers=1, engines=1)

    def body(rank: Rank) -> Any:
        before = [rank.refit(1)]
        buckets = [b.data_ptr() for b in rank.transport._bound.buckets.values()]  # type: ignore[union-attr]
        move(rank.endpoint)
        rank.bind()
        after = [b.data_ptr() for b in rank.transport._bound.buckets.values()]  # type: ignore[union-attr]
        return buckets == after, [*before, rank.refit(2)]

    results = run_well(specs, sources, destinations, body, Setting(bucket_bytes=4096))
    for same, refits in results:
        assert same
        assert all(wrong == [] for _, wrong in refits)


SAID: list[Any] = [None, {}, {"turns": 3}, []]
TURNS: list[Any] = [7, [3], [[0]], [[0, 1, 2]], [[0, 0]], [[-1, 2]], [[2, 2]], [["0", 1]], []]


@pytest.mark.parametrize("said", SAID + [{"turns": {"0": turns}} for turns in TURNS])
def test_what_a_peer_says_of_the_turns_of_what_it_passes_on_is_not_trusted(said: Any) -> None:
    segment = Segment("w", ((0, 4),), 0, 16)
    plan = Plan(0, ((),), ((Message(1, 0, 1, (segment,), 32, 2),),), "", {})
    with pytest.raises(RefitMismatch):
        LocalMessages(plan).learn_turns([None, said, None])


def test_a_relay_of_what_did_not_arrive_before_is_a_fault_of_the_plan() -> None:
    segment = Segment("w", ((0, 4),), 0, 16)
    relay = Message(1, 2, 1, (segment,), 32, 0)
    for received in ((), (replace(relay, source=0, destination=1, round_index=1, nbytes=48),)):
        with pytest.raises(PlanError, match="did not arrive"):
            LocalMessages(Plan(1, ((relay,),), (received,), "", {}))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4)), max_size=30),
    st.integers(2, 4),
)
@settings(max_examples=200, deadline=None)
def test_a_bucket_is_never_taken_before_all_have_read_it(
    rounds: list[tuple[int, int, int]], turns: int
) -> None:
    needs, lanes = [need for need, _, _ in rounds], [lane for _, lane, _ in rounds]
    readers = [
        sorted({min(index + 1 + late, len(rounds) - 1)} - {index}) if late < 3 and need else []
        for index, (need, _, late) in enumerate(rounds)
    ]
    staging = share_buckets(needs, lanes, readers, turns)
    holder: dict[int, int] = {}
    for index, bucket in enumerate(staging.bucket_of):
        assert (bucket >= 0) == (needs[index] > 0)
        if bucket < 0:
            continue
        assert staging.nbytes[bucket] >= needs[index]
        assert staging.before[index] == holder.get(bucket, -1)
        if bucket in holder:
            tenant = holder[bucket]
            assert lanes[tenant] == lanes[index]
            assert all(reader < index for reader in readers[tenant])
            between = [i for i in range(tenant + 1, index) if needs[i] and lanes[i] == lanes[index]]
            assert len(between) >= turns - 1, "the rounds just before are still on the wire"
        holder[bucket] = index
    if not any(readers):
        for lane in range(3):
            used = {b for b, own in zip(staging.bucket_of, lanes, strict=True) if own == lane and b >= 0}
            assert len(used) <= turns


def test_more_trainers_than_lanes_send_to_one_engine_whose_rounds_share_a_lane() -> None:
    # 17 trainers take turns in blocks of rounds: all rounds of the engine are far apart and fall on lane 0.
    specs = [TensorSpec(f"w{i}", (64, 32), torch.float32) for i in range(17)]
    sources = [SyntheticSource(specs, whole([spec])) for spec in specs]
    results = run_well(
        specs,
        sources,
        [SyntheticDestination(specs, whole(specs))],
        lambda rank: (rank.transport._lanes, refit_versions(1, 2)(rank)),
        Setting(lanes=4, verify="full"),
    )
    lanes, _ = results[-1]
    assert len(lanes) > 2
    assert len({*lanes}) == 1
    assert all(wrong == [] for _, refits in results for _, wrong in refits)


@pytest.mark.parametrize("fan_out", [False, True])
def test_a_rank_that_fails_ends_the_others_at_once_though_its_error_is_kept(fan_out: bool) -> None:
    specs, sources, destinations = replicas((64, 96), 4, trainers=1, engines=2)

    def body(rank: Rank) -> Any:
        rank.refit(1)
        if rank.rank == 2:
            bound = rank.transport._bound
            assert bound is not None

            def fail(stage: str) -> None:
                raise ValueError("this rank alone")

            bound.rounds[1].exchange.start = fail  # type: ignore[method-assign]
        return rank.refit(2)

    start = time.monotonic()
    setting = Setting(bucket_bytes=8192, lanes=2, fan_out=fan_out, timeout_s=30.0, pace=TINY_PACE)
    results = run_threads(specs, sources, destinations, body, setting)
    assert time.monotonic() - start < 25
    assert [type(result) for result in results] == [PeerLost, PeerLost, ValueError]


def test_the_limit_of_an_exchange_is_that_of_all_its_messages_together() -> None:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = TorchGroup.open(store, "late", rank, 2, torch.device("cpu"), 20.0, lambda stage: None)
        if rank == 0:
            ended.wait(20)
            return group.close()
        buffers = [torch.zeros(16, dtype=torch.uint8) for _ in range(4)]
        group.timeout_s = 1.0
        start = time.monotonic()
        with pytest.raises(RefitTimeout):
            group.exchange([], [PeerBuffer(0, buffer) for buffer in buffers], "transfer")
        ended.set()
        group.close(failed=True)
        return time.monotonic() - start

    ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        _, seconds = pool.map(run, range(2))
    assert seconds < 4  # one of them alone would have as long as all


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_group_that_can_not_open_all_its_lanes_closes_those_that_it_has(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    closed: list[bool] = []

    def make(group: Group, store: Any) -> Any:
        if made:
            raise error("no more")
        made.append(object())
        return made[0]

    monkeypatch.setattr(TorchGroup, "_make", make)
    monkeypatch.setattr(TorchGroup, "close", lambda group, *, failed: closed.append(failed))
    with pytest.raises(RefitError if error is RuntimeError else error):
        TorchGroup.open(dist.HashStore(), "few", 0, 1, torch.device("cpu"), 1.0, lambda stage: None, 2)
    assert closed == [True]


class FakeBackend:
    """A communicator whose end is stuck or fails, until it is aborted."""

    def __init__(self, stuck: bool):
        self.stuck, self.aborted = stuck, threading.Event()

    def shutdown(self) -> None:
        if not self.stuck:
            raise RuntimeError("remote end")
        self.aborted.wait(20)

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("stuck", [True, False])
def test_a_group_whose_peers_do_not_close_it_as_well_gives_it_up_in_time(
    stuck: bool,
) -> None:
    backends = [FakeBackend(stuck), FakeBackend(stuck)]
    group = TorchGroup(0, 2, torch.device("cuda", 0), 0.2, lambda stage: None, 2, backends)
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 15
    assert all(backend.aborted.is_set() for backend in backends)
    group.close()
