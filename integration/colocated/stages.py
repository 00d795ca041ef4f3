"""Memory stages of a trainer and an engine that take turns on the same GPUs, and the moves between them.

In stages, so that the KV cache and the trainer's weights are never on the GPU together::

    awake ─sleep→ sleeping ─load_trainer→ training ─offload_trainer→ trainer offloaded ─wake_weights→ weights awake
          ─refit→ refitted ─free_trainer→ trainer freed ─wake_kv_cache→ awake

All at once (``multi_stage_wake_up: false``), for engines that can't wake in parts and to see what the stages save::

    … trainer offloaded ─wake_all→ all awake ─refit→ all refitted ─free_trainer→ awake

A refit may read weights in host memory, so ``wake_weights`` or ``wake_all`` may follow ``sleeping`` too. FSDP2's weights can't
be read there. After a refit that was refused or failed, ``sleep`` leads back to the trainer. A move that fails leads to a stage
from which the next moves are known, or to ``lost``.

One move is under way at a time, ``train`` and ``generate`` included. The stage does not change before it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from ..errors import RefitError
from .memory import ProcessMemory

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = frozenset({WEIGHTS, KV_CACHE})


class Stage(StrEnum):
    """What is in GPU memory."""

    AWAKE = "awake"
    SLEEPING = "sleeping(weights, kv_cache)"
    TRAINING = "training"
    TRAINER_PARTLY = "trainer partly there"
    TRAINER_LEAVING = "trainer partly offloaded"
    TRAINER_OFFLOADED = "trainer offloaded"
    WEIGHTS_AWAKE = "weights awake"
    REFITTED = "refitted"
    TRAINER_FREED = "trainer freed"
    ALL_AWAKE = "all awake"
    ALL_REFITTED = "all refitted"
    LOST = "lost"


class Move(StrEnum):
    """What leads from one stage to another, or runs at one."""

    SLEEP = "sleep"
    LOAD_TRAINER = "load_trainer"
    TRAIN = "train"
    OFFLOAD_TRAINER = "offload_trainer"
    WAKE_WEIGHTS = "wake_weights"
    WAKE_ALL = "wake_all"
    REFIT = "refit"
    FREE_TRAINER = "free_trainer"
    WAKE_KV_CACHE = "wake_kv_cache"
    GENERATE = "generate"


Order = Mapping[tuple[Stage, Move], Stage]

_COMMON: dict[tuple[Stage, Move], Stage] = {
    (Stage.AWAKE, Move.GENERATE): Stage.AWAKE,
    (Stage.AWAKE, Move.SLEEP): Stage.SLEEPING,
    (Stage.SLEEPING, Move.LOAD_TRAINER): Stage.TRAINING,
    (Stage.TRAINING, Move.TRAIN): Stage.TRAINING,
    (Stage.TRAINING, Move.OFFLOAD_TRAINER): Stage.TRAINER_OFFLOADED,
    (Stage.TRAINER_OFFLOADED, Move.LOAD_TRAINER): Stage.TRAINING,
    # Weights that are on the GPU in part can't be read.
    (Stage.TRAINER_PARTLY, Move.LOAD_TRAINER): Stage.TRAINING,
    (Stage.TRAINER_LEAVING, Move.LOAD_TRAINER): Stage.TRAINING,
    (Stage.TRAINER_LEAVING, Move.OFFLOAD_TRAINER): Stage.TRAINER_OFFLOADED,
}
_MULTI: Order = MappingProxyType(
    _COMMON
    | {
        (Stage.SLEEPING, Move.WAKE_WEIGHTS): Stage.WEIGHTS_AWAKE,
        (Stage.TRAINER_OFFLOADED, Move.WAKE_WEIGHTS): Stage.WEIGHTS_AWAKE,
        (Stage.WEIGHTS_AWAKE, Move.REFIT): Stage.REFITTED,
        (Stage.WEIGHTS_AWAKE, Move.SLEEP): Stage.SLEEPING,
        (Stage.REFITTED, Move.REFIT): Stage.REFITTED,
        (Stage.REFITTED, Move.FREE_TRAINER): Stage.TRAINER_FREED,
        (Stage.TRAINER_FREED, Move.WAKE_KV_CACHE): Stage.AWAKE,
    }
)
_SINGLE: Order = MappingProxyType(
    _COMMON
    | {
        (Stage.SLEEPING, Move.WAKE_ALL): Stage.ALL_AWAKE,
        (Stage.TRAINER_OFFLOADED, Move.WAKE_ALL): Stage.ALL_AWAKE,
        (Stage.ALL_AWAKE, Move.REFIT): Stage.ALL_REFITTED,
        (Stage.ALL_AWAKE, Move.SLEEP): Stage.SLEEPING,
        (Stage.ALL_REFITTED, Move.REFIT): Stage.ALL_REFITTED,
        (Stage.ALL_REFITTED, Move.FREE_TRAINER): Stage.AWAKE,
    }
)
# The stage after a move that failed, if it is not the stage before. An engine that sleeps or wakes goes through its
# allocations one by one; it can neither say how far it came nor undo it.
_AFTER_FAILURE: Mapping[Move, Stage] = MappingProxyType(
    {
        Move.SLEEP: Stage.LOST,
        Move.WAKE_WEIGHTS: Stage.LOST,
        Move.WAKE_ALL: Stage.LOST,
        Move.WAKE_KV_CACHE: Stage.LOST,
        Move.LOAD_TRAINER: Stage.TRAINER_PARTLY,
        Move.OFFLOAD_TRAINER: Stage.TRAINER_LEAVING,
    }
)
_WHY = {
    Move.SLEEP: "the engine sleeps already, or has new weights that are still to be generated from",
    Move.LOAD_TRAINER: "the engine still holds memory that the trainer's gradients and optimizer need",
    Move.TRAIN: "the trainer is not on the GPU as a whole",
    Move.OFFLOAD_TRAINER: "the trainer's gradients and optimizer are not on the GPU",
    Move.WAKE_WEIGHTS: "the engine's weights wake from its sleep, after the trainer's gradients and optimizer have left the GPU",
    Move.WAKE_ALL: "the engine wakes from its sleep, after the trainer's gradients and optimizer have left the GPU",
    Move.REFIT: "the engine's weights have no memory to be written into, or are in use",
    Move.FREE_TRAINER: "the engine has not got the trainer's weights yet",
    Move.WAKE_KV_CACHE: "the KV cache wakes last: after new weights, and in the memory that the trainer has freed",
    Move.GENERATE: "the engine is not awake with weights of one version",
}
_REMEDY = {
    Stage.LOST: "Start the engine anew (its memory can't be trusted) and make a new cycle",
    Stage.WEIGHTS_AWAKE: "Refit again, in a new epoch (join_refit) if this one has ended; until then the engine refuses to "
    "generate. If it is the trainer whose weights can't be read, have the engine sleep again (sleep), and load_trainer",
    Stage.TRAINER_PARTLY: "Make room and repeat it (load_trainer): till then the trainer's weights can't be read",
    Stage.TRAINER_LEAVING: "Make room in host memory and repeat it (offload_trainer), or bring the trainer back "
    "(load_trainer)",
    Stage.REFITTED: "Repeat it: the KV cache can't wake before the trainer's weights have left the GPU",
}
_REMEDY |= {Stage.ALL_AWAKE: _REMEDY[Stage.WEIGHTS_AWAKE], Stage.ALL_REFITTED: _REMEDY[Stage.REFITTED]}


class StageError(RefitError):
    """A move that is illegal at the present stage. Nothing has changed; ``stage`` names the present one."""


class StageBusy(StageError):
    """Another move is under way, and goes on. The move that was asked for may be illegal once that one has ended."""


class StageRefused(RefitError):
    """The engine or the trainer can't do a move now, and has not begun it. The stage has not changed."""


class StageFailed(RefitError):
    """A move failed with an error that is no :class:`RefitError`; that error is the ``__cause__``. The text says what to do."""


@dataclass(frozen=True)
class StageState:
    """The stage of a trainer and an engine, and the moves that are legal there.

    Attributes:
        multi_stage: whether the engine wakes in stages.
        stage: the present one.
        failed: the move that failed last and its error; empty once a move has succeeded.
        advice: what to do after any failure, for callers that don't go on after one. If it is empty, the stage's remedy is told.
    """

    multi_stage: bool = True
    stage: Stage = Stage.AWAKE
    failed: str = ""
    advice: str = ""

    @property
    def order(self) -> Order:
        """All legal moves: (stage, move) → next stage."""
        return _MULTI if self.multi_stage else _SINGLE

    @property
    def legal(self) -> tuple[Move, ...]:
        """Moves that may be asked for now."""
        return tuple(move for stage, move in self.order if stage is self.stage)

    @property
    def remedy(self) -> str:
        """What to do after the failure; empty if nothing has failed."""
        if not self.failed:
            return ""
        return self.advice or _REMEDY.get(self.stage, "Repeat it once its cause is gone")

    def require(self, move: Move) -> None:
        """Check that a move is legal.

        Raises:
            StageError: it is not; says why, which moves are legal, and the shortest way to this one.
        """
        if (self.stage, move) in self.order:
            return
        told = [f"{move} was asked for at stage {str(self.stage)!r}: {self._why(move)}. Nothing has changed"]
        if self.legal:
            told.append(f"Legal here: {', '.join(self.legal)}")
        way = self.way_to(move)
        if way:
            told.append(f"The way to {move}: {', '.join(way)}")
        if self.failed:
            told.append(f"Before, {self.failed}. {self.remedy}")
        raise StageError(". ".join(told), stage=self.stage)

    def after(self, move: Move) -> StageState:
        """The state after a move that has succeeded.

        Raises:
            StageError: it was illegal.
        """
        self.require(move)
        return replace(self, stage=self.order[self.stage, move], failed="")

    def after_failure(self, move: Move, error: BaseException) -> StageState:
        """The state after a move that has failed.

        Raises:
            StageError: it was illegal.
        """
        self.require(move)
        stage = _AFTER_FAILURE.get(move, self.stage)
        if move is Move.REFIT:
            stage = Stage.WEIGHTS_AWAKE if self.multi_stage else Stage.ALL_AWAKE
        return replace(self, stage=stage, failed=f"{move} failed: {type(error).__name__}: {error}")

    def way_to(self, move: Move) -> tuple[Move, ...] | None:
        """The shortest sequence of moves after which ``move`` is legal; None if there is none."""
        ways: dict[Stage, tuple[Move, ...]] = {self.stage: ()}
        queue = deque([self.stage])
        while queue:
            stage = queue.popleft()
            if (stage, move) in self.order:
                return ways[stage]
            for (before, step), after in self.order.items():
                if before is stage and after not in ways:
                    ways[after] = (*ways[stage], step)
                    queue.append(after)
        return None

    def _why(self, move: Move) -> str:
        if self.stage is Stage.LOST:
            return "how much of the engine's memory is there is not known"
        if move not in {step for _, step in self.order}:
            other = "true" if not self.multi_stage else "false"
            return f"it belongs to multi_stage_wake_up: {other}, and this cycle has the other order"
        return _WHY[move]


class SleepingEngine(Protocol):
    """All workers of an engine, or of all its replicas, on the trainer's GPUs."""

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back: level 1 keeps the weights in host memory, level 2 keeps nothing.

        Raises:
            StageRefused: it can't now, because requests are running, say. Nothing has changed.
        """

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory for ``weights``, ``kv_cache`` or both. The engine's other memory (CUDA graphs) wakes with the KV cache.
        No request runs before all is awake.

        Raises:
            StageRefused: it can't now, and nothing has changed.
        """

    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` have no memory now on some worker."""

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""

    def memory(self, *, restart: bool = False) -> Sequence[ProcessMemory]:
        """Memory of each worker, with the peaks since the last restart. ``restart`` restarts them after this."""


class ColocatedTrainer(Protocol):
    """All trainer ranks that share GPUs with an engine. Each call may be repeated after it has failed."""

    def onload(self) -> None:
        """Bring weights, gradients and optimizer to the GPU, or make them there."""

    def offload(self) -> None:
        """Take everything off the GPU that a refit does not read: gradients, optimizer, kept activations."""

    def free(self) -> None:
        """Take the weights off the GPU too."""

    def empty_cache(self) -> None:
        """Have all ranks give back what their allocators cache."""

    def memory(self, *, restart: bool = False) -> Sequence[ProcessMemory]:
        """As :meth:`SleepingEngine.memory`, of each rank."""
