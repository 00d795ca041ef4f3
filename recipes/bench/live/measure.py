"""What is measured of a path: seconds, stages, memory, and whether every byte arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from ....integration.records.record import RefitSummary, summarize
from ..measure import Timing
from .engine import Checksums
from .memory import Memory, largest
from .paths import Routes, Stage, make_path

# The first refits are compared, too: a stale plan or buffer shows in the second.
_COMPARED = (1, 2)
_PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64]]
_TOKENS = 16


@dataclass(frozen=True)
class Held:
    """What the engine held and said after refit ``number``: checksums by worker and parameter, greedy tokens."""

    number: int
    checksums: list[Checksums]
    tokens: list[list[int]]


@dataclass(frozen=True)
class MemoryPoint:
    """Memory after a refit: of each side the rank that has most."""

    number: int
    trainer: Memory
    engine: Memory


@dataclass(frozen=True)
class PathResult:
    """A path's refits, or the reason why there are none.

    Attributes:
        name: as it was asked for.
        not_run: why it did not run; the rest is empty then.
        routes: of the weights.
        open_seconds: from the first call to a session that is ready.
        first_seconds: of the first refit.
        timing: of the timed refits, from trainer rank 0's call until the engine has answered and every trainer's
            device is done.
        own_seconds: median of the refits' own time, without the way to the engine's workers and back; 0 for a peer that
            keeps no records.
        seconds: of every refit, in order.
        stages: median over the timed refits of the slowest rank's seconds by stage.
        bytes_bulk: shard to shard, over all engine workers.
        bytes_misc: on the misc path, over all engine workers.
        peak_extra_bytes: of each side, torch's peak above what it held before the path was opened.
        growth_bytes: of each side, ``used`` (on a CPU ``rss``) after the last refit less that after the warm-up.
        before: memory before the path was opened.
        memory: after every refit.
        faults: what the checks found, one sentence each.
    """

    name: str
    not_run: str = ""
    routes: Routes = field(default_factory=lambda: Routes(""))
    open_seconds: float = 0.0
    first_seconds: float = 0.0
    timing: Timing | None = None
    own_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    bytes_bulk: int = 0
    bytes_misc: int = 0
    peak_extra_bytes: dict[str, int] = field(default_factory=dict)
    growth_bytes: dict[str, int] = field(default_factory=dict)
    before: MemoryPoint | None = None
    memory: list[MemoryPoint] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def misc(self) -> dict[str, int]:
        """Reason → number of weights on the misc path."""
        return dict(Counter(self.routes.misc_reasons.values()))


@dataclass(frozen=True)
class LiveResult:
    """All that a run measured.

    Attributes:
        device: what the trainer ran on.
        engine: versions of what ran in the engine's process.
        kept_bytes: parameters of the largest engine worker.
        startup_seconds: of the trainer's model, of the engine, and of learning the trainer's weights.
        paths: one for each path that was asked for and has run, in order.
    """

    device: str
    engine: dict[str, str]
    kept_bytes: int
    startup_seconds: dict[str, float]
    paths: list[PathResult]

    @property
    def faults(self) -> list[str]:
        """All faults, with the path's name."""
        return [f"{path.name}: {fault}" for path in self.paths for fault in path.faults]

    @property
    def bit_exact(self) -> bool | None:
        """Whether all paths left the same bytes; None where fewer than two ran, and nothing was compared."""
        if self.faults:
            return False
        return True if sum(path.timing is not None for path in self.paths) > 1 else None


class Oracle:
    """What the engine must hold after refit ``number``: what the first path left there; kept on rank 0."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, Held]] = {}

    def faults(self, name: str, held: list[Held]) -> list[str]:
        """What differs, one sentence each, and NaN or weights that did not change, which need no comparison."""
        found: list[str] = []
        for now in held:
            for worker, checksums in enumerate(now.checksums):
                left = [parameter for parameter, (*_, nans) in checksums.items() if nans]
                if left:
                    found.append(
                        f"refit {now.number} left the poison in {len(left)} parameters of worker {worker}, the first {left[0]}"
                    )
            if now.number not in self._first:
                self._first[now.number] = (name, now)
                continue
            before, expected = self._first[now.number]
            for worker, (ours, theirs) in enumerate(zip(now.checksums, expected.checksums, strict=True)):
                other = [parameter for parameter in theirs if ours.get(parameter) != theirs[parameter]]
                if other:
                    found.append(
                        f"refit {now.number} left other bytes than {before} in {len(other)} parameters of worker {worker}, "
                        f"the first {other[0]}"
                    )
            if now.tokens != expected.tokens:
                found.append(
                    f"after refit {now.number} the engine generates other tokens than after {before}'s"
                )
        return found + _unchanged(held)


def measure(stage: Stage, name: str, refits: int, warm_up: int, oracle: Oracle) -> PathResult:
    """Open a path, time its refits and check what they left; all trainer ranks call it together.

    Args:
        stage: of the run.
        name: of the path.
        refits: timed refits.
        warm_up: refits before them.
        oracle: what earlier paths left.

    Raises:
        RefitError: the path failed.
    """
    options, ranks = stage.options, stage.ranks
    path = make_path(stage, name)
    reason = next((told for told in ranks.collect(path.unavailable()) if told), "")
    if reason:
        return PathResult(name, not_run=reason)
    before = _memory(stage, 0, restart=True)
    routes: list[Routes] = []
    open_seconds = max(ranks.collect(ranks.timed(lambda: routes.append(path.open()))))
    seconds: list[float] = []
    summaries: list[RefitSummary] = []
    points: list[MemoryPoint] = []
    held: list[Held] = []
    last = warm_up + refits

    def move(number: int) -> float:
        stage.trainer.change_weights(number)
        compared = number in (*_COMPARED, last, options.last)
        if compared and stage.engine is not None:
            stage.engine.call("poison")
        rows: list[Any] = []
        taken = max(ranks.collect(ranks.timed(lambda: rows.extend(path.refit(number)))))
        records = [record for rank in ranks.collect(rows) for record in rank]
        if records:
            summaries.append(summarize(records))
        points.append(_memory(stage, number))
        if compared and stage.engine is not None:
            held.append(
                Held(
                    number,
                    stage.engine.call("checksums"),
                    stage.engine.call("generate", _PROMPTS, _TOKENS),
                )
            )
        return taken

    for number in range(1, last + 1):
        seconds.append(move(number))
    if last < options.last:
        # The last weights of the longest path, which has them compared with this one's.
        move(options.last)
    path.close()
    timed = summaries[warm_up:last]
    faults = ranks.share(oracle.faults(name, held) if ranks.leads else None)
    return PathResult(
        name,
        routes=routes[0],
        open_seconds=open_seconds,
        first_seconds=seconds[0],
        timing=Timing.of(seconds[warm_up:]),
        own_seconds=median(s.seconds for s in timed) if timed else 0.0,
        seconds=seconds,
        stages={
            key: median(s.seconds_by_stage.get(key, 0.0) for s in timed)
            for key in dict.fromkeys(key for s in timed for key in s.seconds_by_stage)
        },
        bytes_bulk=summaries[-1].bytes_bulk if summaries else 0,
        bytes_misc=summaries[-1].bytes_misc if summaries else 0,
        peak_extra_bytes=_each(
            lambda side: max(_of(p, side).get("peak", 0) for p in points), before, "allocated"
        ),
        growth_bytes=_growth(points[warm_up - 1 : last]),
        before=before,
        memory=points,
        faults=faults,
    )


def _each(value: Callable[[str], int], before: MemoryPoint, figure: str) -> dict[str, int]:
    return {side: value(side) - _of(before, side).get(figure, 0) for side in ("trainer", "engine")}


def _growth(points: list[MemoryPoint]) -> dict[str, int]:
    figure = "used" if "used" in points[0].trainer else "rss"
    return _each(lambda side: _of(points[-1], side)[figure], points[0], figure)


def _of(point: MemoryPoint, side: str) -> Memory:
    return point.trainer if side == "trainer" else point.engine


def _memory(stage: Stage, number: int, *, restart: bool = False) -> MemoryPoint:
    trainer = largest(stage.ranks.collect(stage.ranks.memory(restart=restart)))
    answers = stage.engine.call("memory", restart) if stage.engine is not None else None
    return MemoryPoint(number, trainer, largest(stage.ranks.share(answers)))


def _unchanged(held: list[Held]) -> list[str]:
    """Parameters that two different weights gave the same bytes: they were not really written, or not changed."""
    found = []
    for earlier, later in pairwise(held):
        for worker, (a, b) in enumerate(zip(earlier.checksums, later.checksums, strict=True)):
            same = [parameter for parameter in a if a[parameter] == b[parameter]]
            if same:
                found.append(
                    f"refits {earlier.number} and {later.number} left the same bytes in {len(same)} parameters of worker "
                    f"{worker}, the first {same[0]}"
                )
    return found
