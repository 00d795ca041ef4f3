"""What is timed: the wire's own rate, the refit over one transport, and a peer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ...integration.control import Rendezvous, RendezvousServer, open_rendezvous
from ...integration.plan import Plan
from ...integration.records.clock import STAGES
from ...integration.records.record import RefitRecord
from ...integration.session import RefitSession
from .peers import PEERS, Peer
from .ranks import BenchRanks
from .scene import Scene

Ints = npt.NDArray[np.int64]
_HOST = "127.0.0.1"
# The refits whose result is compared with the true values: a stale plan or buffer shows in the second or third.
CHECKED = (1, 2, 3)
_PROBE_RUNS, _PROBE_WARM_UP = 7, 2
_COPIES = 8


@dataclass(frozen=True)
class Timing:
    """Seconds of a run, each the maximum over ranks."""

    median: float
    minimum: float
    maximum: float

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        """Of at least one time."""
        return Timing(median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class RefitResult:
    """A transport's refits.

    Attributes:
        transport: what carried the bulk bytes.
        reason: why that one.
        timing: of the timed refits, from the call to the last rank's idle device.
        stages: median over refits of the slowest rank's seconds by stage.
        host_seconds: median over refits of the busiest rank's CPU time beyond waiting.
        peak_extra_bytes: largest over refits and ranks.
        bit_exact: whether all checked refits were; None if none was checked.
        faults: what the checks found, one sentence each.
        misc: reason → number of weights on the misc path.
        timelines: stages of the last timed refit, by rank; empty unless asked for.
        pair_bytes: where ranks share GPUs, bytes of the bulk path from each rank to each rank, int64 ``[world, world]``;
            else, and where everything goes to all, None.
    """

    transport: str
    reason: str
    timing: Timing
    stages: dict[str, float]
    host_seconds: float
    peak_extra_bytes: int
    bit_exact: bool | None
    faults: list[str]
    misc: dict[str, int]
    timelines: list[list[tuple[str, float, float]]]
    pair_bytes: Ints | None = None


@dataclass(frozen=True)
class DeltaResult:
    """A transport's sparse refits.

    Attributes:
        changed: share of all elements that changed before each.
        found: median share of what travels that differed: of codes and scales where trainers quantize.
        timing: of the refits, as :class:`RefitResult` has it.
        wire_ratio: bytes that travelled, of those of a dense refit; over all engines.
        stages: median over refits of the slowest rank's seconds by stage.
        base_bytes: that the trainer rank with most keeps to compare with, or of its mask.
        record: median seconds that recording a change took before the refit, with ``delta_base: optimizer``.
        faults: what the checks of the first and the last one found.
    """

    changed: float
    found: float
    timing: Timing
    wire_ratio: float
    stages: dict[str, float]
    base_bytes: int
    record: float
    faults: list[str]


@dataclass(frozen=True)
class PeerResult:
    """A peer's runs: its times, or the reason why there are none."""

    timing: Timing | None
    reason: str = ""


def pairwise_rate(ranks: BenchRanks, nbytes: int) -> float | None:
    """GB/s at which trainer i sends to engine i, all pairs at once, each ``nbytes`` in one message; the median.

    Where these share a GPU, which NCCL would not join, trainer i sends to trainer i + 1; None if there is no other GPU.
    """
    train = ranks.train_ranks
    if ranks.colocated:
        targets = {i: (i + 1) % train for i in range(train)} if train > 1 else {}
        group = ranks.group(range(train)) if targets else None
    else:
        targets = {i: train + i for i in range(min(train, ranks.size - train))}
        group = ranks.group(range(ranks.size))
    if not targets:
        return None
    sources = {target: source for source, target in targets.items()}
    operations: list[dist.P2POp] = []
    for move, peers in ((dist.isend, targets), (dist.irecv, sources)):
        if ranks.rank in peers:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
            operations.append(dist.P2POp(move, buffer, peers[ranks.rank], group))
            del buffer

    def exchange() -> None:
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    seconds = _repeat(ranks, exchange, _PROBE_RUNS + _PROBE_WARM_UP)[_PROBE_WARM_UP:]
    operations.clear()
    ranks.free()
    return nbytes / median(seconds) / 1e9


def copy_rate(ranks: BenchRanks, nbytes: int) -> float:
    """GB/s at which each trainer's device copies between two allocations of ``nbytes``, all at once; the median.

    Bytes count once, though each is read and written.
    """
    pair = [torch.zeros(nbytes * ranks.is_source, dtype=torch.uint8, device=ranks.device) for _ in range(2)]

    def copy() -> None:
        # Enough for the time of a start and a synchronization not to matter.
        for _ in range(_COPIES):
            pair[0].copy_(pair[1])

    seconds = _repeat(ranks, copy, _PROBE_RUNS + _PROBE_WARM_UP)[_PROBE_WARM_UP:]
    pair.clear()
    ranks.free()
    return _COPIES * nbytes / median(seconds) / 1e9


def refits(scene: Scene, transport: str) -> RefitResult:
    """Time complete refits over ``transport``: begin, transfer, post-load work and commit.

    Raises:
        RefitError: from the session.
    """
    options, ranks = scene.options, scene.ranks
    session, server = _open(scene, transport)
    try:
        records: list[RefitRecord] = []
        seconds: list[float] = []
        faults: list[str] = []
        total = options.warm_up + options.refits
        checked = {*CHECKED, total} if options.check else set()
        for number in range(1, total + 1):
            scene.give_memory_back()
            scene.advance()
            if number in checked:
                scene.poison()
            taken = ranks.timed(lambda: records.append(session.refit(scene.endpoint.version)))
            if number > options.warm_up:
                seconds.append(taken)
            if number in checked:
                faults += [f"refit {number}, {fault}" for fault in scene.faults()]
        misc: dict[str, int] = {}
        for entry in session.manifest:
            if entry.route == "misc":
                misc[entry.reason] = misc.get(entry.reason, 0) + 1
        timed = records[options.warm_up :]
        stages = {
            stage: median(ranks.maxima(record.seconds.get(stage, 0.0) for record in timed))
            for stage in STAGES
        }
        return RefitResult(
            transport=session.engine.transport_name,
            reason=session.engine.transport_reason,
            timing=Timing.of(ranks.maxima(seconds)),
            stages={stage: taken for stage, taken in stages.items() if taken},
            host_seconds=median(ranks.maxima(record.host_seconds for record in timed)),
            peak_extra_bytes=int(max(ranks.maxima(record.peak_extra_bytes for record in timed))),
            bit_exact=not faults if checked else None,
            faults=faults,
            misc=misc,
            timelines=_timelines(scene, session) if options.timeline else [],
            pair_bytes=_pair_bytes(scene, session) if options.colocated else None,
        )
    finally:
        session.close()
        if server is not None:
            server.close()
        ranks.free()


def deltas(scene: Scene, transport: str) -> list[DeltaResult]:
    """Time sparse refits over ``transport`` for each share of change, in one epoch.

    Raises:
        RefitError: from the session.
    """
    options, ranks = scene.options, scene.ranks
    if not options.changed:
        return []
    session, server = _open(scene, transport, delta="always")
    try:
        scene.advance()
        ranks.timed(lambda: session.refit(scene.endpoint.version))
        return [_sparse_refits(scene, session, share) for share in options.changed]
    finally:
        session.close()
        if server is not None:
            server.close()
        ranks.free()


def _sparse_refits(scene: Scene, session: RefitSession, share: float) -> DeltaResult:
    options, ranks = scene.options, scene.ranks
    records: list[RefitRecord] = []
    seconds: list[float] = []
    recorded: list[float] = []
    faults: list[str] = []
    for number in range(options.refits + 1):
        with ExitStack() as stack:
            begun = ranks.timed(lambda stack=stack: stack.enter_context(session.recording_changes()))
            scene.change(share)
            recorded.append(begun + ranks.timed(stack.close))
        seconds.append(ranks.timed(lambda: records.append(session.refit(scene.endpoint.version))))
        # The first is not timed: its buffers grow.
        if options.check and number in (0, options.refits):
            faults += [f"refit {number + 1} at {share:.2%}, {fault}" for fault in scene.faults()]
    timed = records[1:]
    stages = {
        stage: median(ranks.maxima(record.seconds.get(stage, 0.0) for record in timed)) for stage in STAGES
    }
    mine = not ranks.is_source
    wire = [(r.bytes_wire * mine, (r.bytes_bulk + r.bytes_misc) * mine) for r in timed]
    told = ranks.collect([median(column) for column in zip(*wire, strict=True)])
    return DeltaResult(
        changed=share,
        found=median(ranks.maxima(record.changed_share or 0.0 for record in timed)),
        timing=Timing.of(ranks.maxima(seconds[1:])),
        wire_ratio=sum(sent for sent, _ in told) / sum(dense for _, dense in told),
        stages={stage: taken for stage, taken in stages.items() if taken},
        base_bytes=int(ranks.maxima([session.engine.base_bytes])[0]),
        record=median(ranks.maxima(recorded[1:])),
        faults=faults,
    )


def _pair_bytes(scene: Scene, session: RefitSession) -> Ints | None:
    """As of :class:`RefitResult`, from the messages of all ranks' own plans."""
    ranks, bulk = scene.ranks, session.engine.planned.bulk
    if bulk is None or not isinstance(bulk.plan, Plan):
        return None
    sent = np.zeros((ranks.size, ranks.size), dtype=np.int64)
    for message in (message for messages in bulk.plan.sends for message in messages):
        sent[message.source, message.destination] += message.payload_bytes
    return cast(Ints, np.sum(ranks.collect(sent), axis=0))


def _timelines(scene: Scene, session: RefitSession) -> list[list[tuple[str, float, float]]]:
    """Stages of one more refit, by rank."""
    scene.advance()
    records: list[RefitRecord] = []
    scene.ranks.timed(lambda: records.append(session.refit(scene.endpoint.version, timeline=True)))
    return scene.ranks.collect([tuple(interval) for interval in records[0].timeline])


def peer(scene: Scene, name: str) -> PeerResult:
    """Time a peer after one checked run. A peer's error is part of its result and does not end the benchmark."""
    ranks = scene.ranks
    kind = PEERS[name]
    reason = _first(ranks, kind.unavailable(scene))
    if reason:
        return PeerResult(None, reason)
    made: list[Peer] = []
    reason = _attempt(ranks, lambda: made.append(kind(scene)))
    if not reason:
        scene.advance()
        scene.poison()
        # Timed as the others are, for what comes before a run: a peer's own streams would not wait for the
        # kernels that have just been started above.
        reason = _attempt(ranks, lambda: ranks.timed(made[0].run))
    if reason:
        return PeerResult(None, reason)
    faults = scene.faults()
    seconds = []
    for _ in range(0 if faults else scene.options.peer_refits):
        scene.advance()
        seconds.append(ranks.timed(made[0].run))
    made.pop().close()
    ranks.free()
    if faults:
        return PeerResult(None, f"not bit-exact in {len(faults)} places, the first on {faults[0]}")
    return PeerResult(Timing.of(ranks.maxima(seconds)))


def _attempt(ranks: BenchRanks, work: Callable[[], Any]) -> str:
    """Run another library's ``work`` on all ranks; the first rank's error in words if any rank had one."""
    try:
        work()
        ranks.synchronize()
        error = ""
    except Exception as failure:  # whatever that library raises is the answer
        error = f"{type(failure).__name__}: {failure}"
    return _first(ranks, error)


def _first(ranks: BenchRanks, reason: str) -> str:
    return next((found for found in ranks.collect(reason) if found), "")


def _open(scene: Scene, transport: str, delta: str = "off") -> tuple[RefitSession, RendezvousServer | None]:
    options, ranks = scene.options, scene.ranks
    config = replace(options.refit_config(transport), delta=delta, delta_base=options.delta_base)
    server = None
    meeting: dict[str, Any] | None = None
    if ranks.rank == 0:
        server = open_rendezvous(_HOST, options.train_ranks, options.gen_ranks)
        meeting = server.rendezvous.to_json()
    rendezvous = Rendezvous.from_json(ranks.share(meeting))
    session = RefitSession.open(
        rendezvous, ranks.rank, lambda: scene.endpoint, config, engine=options.engine(transport)
    )
    return session, server


def _repeat(ranks: BenchRanks, work: Callable[[], Any], times: int) -> list[float]:
    return ranks.maxima([ranks.timed(work) for _ in range(times)])
