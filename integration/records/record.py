"""One record per refit and rank, and what the driver makes of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import STAGES, Interval


@dataclass(frozen=True)
class RefitRecord:
    """One rank's account of one refit.

    Attributes:
        version: version that the refit committed.
        epoch: membership it ran in.
        rank: rank in the refit world, trainers first.
        role: ``trainer`` or ``generation``.
        engine: checkpoint engine, e.g. ``nccl_xfer``.
        transport: transport of the bulk path, or ``broadcast``.
        bytes_bulk: bulk bytes that this rank sent (trainer) or kept (generation).
        bytes_misc: misc bytes that this rank sent or received.
        bytes_kept: bytes of the parameters that a generation rank keeps (its shard of the model); 0 on trainers.
        bytes_verified: bytes whose checksums were compared.
        seconds_total: wall time on this rank, until all its work on the device is done, every rank has said so
            and this record is made.
        seconds: time by stage, as :class:`~.clock.StageClock` defines it; stages may overlap, so that
            their sum may be more than ``seconds_total``.
        host_seconds: CPU time of the thread that ran the refit and made this record, without its waits. A trainer on CPUs exports
            in another thread. What ``m2n`` enqueues in a thread of its own counts.
        peak_extra_bytes: bytes of the staging that is held between refits, and the larger of two: the buffers
            that a refit takes beside it, or on a GPU the allocator's peak above the start of this refit.
        timeline: every interval of every stage, in seconds after the refit's start; empty unless asked for.
        stage_peaks: where trainer and engine share GPUs, for each move of the cycle that this refit belongs to the most
            bytes in use on one GPU, by all processes (:mod:`~..colocated.cycle`); else empty.
        bytes_wire: bytes that travelled of all these: fewer than ``bytes_bulk + bytes_misc`` after a sparse refit.
        changed_share: of the bulk elements that this rank sends or receives, the share that differed from the version before;
            None after a dense refit.
        bytes_resharded: of ``bytes_bulk``, those that NVIDIA's ``nccl.m2n`` carried, under ``transport: m2n``; ``p2p`` carried the
            others.
        handles_opened: handles of peers' GPU memory (of allocations; descriptors of chunks) that this rank opened since its last
            record: as the ranks met, or since memory slept or moved. 0 where no memory is mapped.
    """

    version: int
    epoch: int
    rank: int
    role: str
    engine: str
    transport: str
    bytes_bulk: int
    bytes_misc: int
    bytes_kept: int
    bytes_verified: int
    seconds_total: float
    seconds: dict[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    peak_extra_bytes: int = 0
    timeline: Sequence[Interval] = ()
    stage_peaks: dict[str, int] = field(default_factory=dict)
    bytes_wire: int = 0
    changed_share: float | None = None
    handles_opened: int = 0
    bytes_resharded: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON lines; without ``timeline`` and ``stage_peaks`` if there are none."""
        data = asdict(self)
        for name in ("timeline", "stage_peaks"):
            if not data[name]:
                del data[name]
        return data


@dataclass(frozen=True)
class RefitSummary:
    """A refit over all ranks: times are maxima, bytes are sums over generation ranks.

    ``changed_share`` is the largest of any engine's, after a sparse refit. ``kept_gb_per_s`` is the largest kept shard of a
    generation rank over the slowest rank's time, in units of 1e9 bytes per second.
    """

    version: int
    seconds: float
    seconds_by_stage: dict[str, float]
    bytes_bulk: int
    bytes_misc: int
    kept_gb_per_s: float
    peak_extra_bytes: int
    bytes_verified: int
    host_seconds: float = 0.0
    bytes_wire: int = 0
    changed_share: float | None = None


def summarize(records: Sequence[RefitRecord]) -> RefitSummary:
    """Reduce the records of one refit.

    Raises:
        ValueError: the records are of different versions, so a rank missed a refit.
    """
    versions = {r.version for r in records}
    if len(versions) != 1:
        raise ValueError(
            f"records of refit versions {sorted(versions)} can't be summed up: a rank missed a refit"
        )
    engines = [r for r in records if r.role == "generation"]
    seconds = max(r.seconds_total for r in records)
    return RefitSummary(
        version=versions.pop(),
        seconds=seconds,
        seconds_by_stage={
            stage: max(r.seconds.get(stage, 0.0) for r in records)
            for stage in STAGES
            if any(stage in r.seconds for r in records)
        },
        bytes_bulk=sum(r.bytes_bulk for r in engines),
        bytes_misc=sum(r.bytes_misc for r in engines),
        kept_gb_per_s=max((r.bytes_kept for r in engines), default=0) / seconds / 1e9,
        peak_extra_bytes=max(r.peak_extra_bytes for r in records),
        bytes_verified=sum(r.bytes_verified for r in engines),
        host_seconds=max(r.host_seconds for r in records),
        bytes_wire=sum(r.bytes_wire for r in engines),
        changed_share=max((r.changed_share for r in engines if r.changed_share is not None), default=None),
    )
