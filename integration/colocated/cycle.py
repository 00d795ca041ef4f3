"""The cycle of a trainer and an engine that share GPUs: moves in their order, each with a record of memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from ..errors import RefitError
from ..records.record import RefitRecord
from .memory import ProcessMemory, StageRecord
from .stages import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    ColocatedTrainer,
    Move,
    SleepingEngine,
    Stage,
    StageBusy,
    StageError,
    StageFailed,
    StageRefused,
    StageState,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_GIB = 1 << 30
_REFITTED = frozenset({Stage.REFITTED, Stage.ALL_REFITTED, Stage.TRAINER_FREED})
# Stages from which new weights can still reach the engine before it generates.
_BEFORE_REFIT = frozenset(
    {
        Stage.SLEEPING,
        Stage.TRAINING,
        Stage.TRAINER_LEAVING,
        Stage.TRAINER_OFFLOADED,
        Stage.WEIGHTS_AWAKE,
        Stage.REFITTED,
        Stage.ALL_AWAKE,
        Stage.ALL_REFITTED,
    }
)


class UnderWay:
    """The call that is under way. Another call is refused at once.

    A row of moves is a call too. Between its moves, only the thread that makes them may call. While a move is under way no
    other call is allowed, not even from within it, since the move's work relies on the stage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Outermost first.
        self._names: list[str] = []
        self._moving = False
        self._thread: threading.Thread | None = None
        self._since = 0.0

    @contextmanager
    def row(self, name: str, stage: Stage) -> Iterator[None]:
        """Hold a row of moves together; ``stage`` is the present one.

        Raises:
            StageBusy: a move is under way, or a row of another thread's.
        """
        self._enter(name, stage, moving=False)
        try:
            yield
        finally:
            self._leave(moving=False)

    @contextmanager
    def move(self, name: str, stage: Stage) -> Iterator[None]:
        """Make one move; as :meth:`row`."""
        self._enter(name, stage, moving=True)
        try:
            yield
        finally:
            self._leave(moving=True)

    def _enter(self, name: str, stage: Stage, *, moving: bool) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._moving or (self._names and self._thread is not thread):
                raise self._refusal(name, stage, thread)
            if not self._names:
                self._thread, self._since = thread, time.perf_counter()
            self._names.append(name)
            self._moving = moving

    def _leave(self, *, moving: bool) -> None:
        with self._lock:
            self._names.pop()
            if moving:
                self._moving = False

    def _refusal(self, asked: str, stage: Stage, thread: threading.Thread) -> StageBusy:
        row, call = self._names[0], self._names[-1]
        told = call if row == call else f"{call} of {row}"
        seconds = time.perf_counter() - self._since
        if self._thread is thread:
            where, remedy = "it was asked for from within that call", "Ask once that call has returned"
        else:
            name = self._thread.name if self._thread is not None else ""
            where = f"for {seconds:.1f} s, in thread {name!r}"
            remedy = "Wait for that call to return (join its thread, await its result), and ask then"
        return StageBusy(
            f"{asked} was asked for while {told} is under way ({where}): both would use the same memory. {asked} has changed "
            f"nothing, and {told} goes on. {remedy}",
            stage=stage,
        )


class ColocatedCycle:
    """Moves both through the stages of :mod:`.stages`. A move that is illegal at the present stage is an error.

    Several threads may call it. It does one call at a time. A call while a move is under way, from within it too, is refused
    with the move's name (:class:`~.stages.StageBusy`) and changes nothing. All that generates at the same time goes into one
    :meth:`generate`. Coroutines use ``workers.engines.common.awaited``.

    At first the engine is awake, or asleep as a whole, and the trainer is off the GPU: start the engine, then call
    :meth:`to_training`. If the first ``onload`` makes the trainer, the two are never on the GPU together.

    Args:
        engine: all workers that share GPUs with the trainer.
        trainer: all its ranks.
        refit: moves the weights as a version, on both sides at the same time, and returns all records.
        multi_stage_wake_up: wake the weights, and the KV cache after the trainer has left the GPU; otherwise all at
            once, before the refit.
        sleep_level: 2 discards the weights, which the next refit brings; 1 keeps them in host memory.
        on_stage: called with the record of each move, of those that failed too.
        after_failure: returns, within seconds, the memory of the processes that still answer after a move has failed. A rank
            that waits for the failed one does not answer. With None both sides are asked as after a success. After an
            interrupt no process is asked.
        advice: what an error's text advises. If it is empty, the text has the remedy of the stage.

    Raises:
        StageError: a part of the engine sleeps.
    """

    def __init__(
        self,
        engine: SleepingEngine,
        trainer: ColocatedTrainer,
        refit: Callable[[int], Sequence[RefitRecord]],
        *,
        multi_stage_wake_up: bool = True,
        sleep_level: int = 2,
        on_stage: Callable[[StageRecord], None] | None = None,
        after_failure: Callable[[], Sequence[ProcessMemory]] | None = None,
        advice: str = "",
    ) -> None:
        if sleep_level not in (1, 2):
            raise StageError(
                f"sleep_level is {sleep_level}; 1 keeps the engine's weights in host memory, 2 discards them",
                stage="settings",
            )
        asleep = engine.asleep()
        if asleep not in (frozenset(), TAGS):
            raise StageError(
                f"of the engine, {', '.join(sorted(asleep))} is asleep and the rest awake, so that its stage is not "
                "known; wake all of it up before the cycle begins",
                stage="settings",
            )
        self.state = StageState(multi_stage_wake_up, Stage.SLEEPING if asleep else Stage.AWAKE, advice=advice)
        self._engine = engine
        self._trainer = trainer
        self._refit = refit
        self._sleep_level = sleep_level
        self._on_stage = on_stage
        self._after_failure = after_failure
        self._cycles = 0
        self._peaks: dict[str, int] = {}
        self._under_way = UnderWay()
        # Of the last refit.
        self._records: list[RefitRecord] = []

    def to_training(self) -> None:
        """Have the engine sleep, and bring the trainer to the GPU. Goes on where an earlier call has failed.

        An engine that waits for a refit sleeps again and loses its weights. The next refit brings them.
        """
        with self._under_way.row("to_training", self.state.stage):
            if Move.SLEEP in self.state.legal:
                self.sleep()
            self.load_trainer()

    def to_generation(self, version: int) -> list[RefitRecord]:
        """Bring the trainer's weights to the engine, the engine awake and the trainer off the GPU.

        Goes on where an earlier call with this version has failed.

        Returns:
            The refit's records, with the peaks of all stages since the last refit's.

        Raises:
            StageError: the engine does not sleep, or is about to wake with another version, or a move is under way.
            RefitError: a move failed; a note says what to do.
        """
        with self._under_way.row("to_generation", self.state.stage):
            there = self.state.stage in _REFITTED and {record.version for record in self._records} == {
                version
            }
            if not there and self.state.stage not in _BEFORE_REFIT:
                self.state.require(Move.REFIT)
            if self.state.stage in (Stage.TRAINING, Stage.TRAINER_LEAVING):
                self.offload_trainer()
            if self.state.stage in (Stage.SLEEPING, Stage.TRAINER_OFFLOADED):
                if self.state.multi_stage:
                    self.wake_weights()
                else:
                    self.wake_all()
            if not there:
                self.refit(version)
            if self.state.stage is not Stage.TRAINER_FREED:
                self.free_trainer()
            if self.state.multi_stage:
                self.wake_kv_cache()
            peaks, self._peaks = self._peaks, {}
            return [replace(record, stage_peaks=peaks) for record in self._records]

    def sleep(self) -> None:
        """Have the engine give all its memory back."""

        def sleep() -> None:
            # An engine sleeps as a whole. If a part sleeps already, it ignores the call.
            rest = self._engine.asleep()
            if rest:
                self._wake(*sorted(rest))
            try:
                self._engine.sleep(self._sleep_level)
            except StageRefused as error:
                if not rest:
                    raise
                raise RefitError(
                    f"the engine has refused to sleep ({error}) after {_listed(rest)} was woken for it, so that what holds its "
                    "memory is no stage's",
                    stage="sleep",
                ) from error

        self._do(Move.SLEEP, sleep, asleep=TAGS)

    def load_trainer(self) -> None:
        """Bring the trainer to the GPU as a whole."""
        self._do(Move.LOAD_TRAINER, self._trainer.onload)

    def train(self, work: Callable[[], Result]) -> Result:
        """Do the trainer's work."""
        return self._do(Move.TRAIN, work)

    def offload_trainer(self) -> None:
        """Leave only the trainer's weights on the GPU."""
        self._do(Move.OFFLOAD_TRAINER, self._trainer.offload)

    def wake_weights(self) -> None:
        """Give the engine's weights memory."""
        self._do(Move.WAKE_WEIGHTS, lambda: self._wake(WEIGHTS), asleep=frozenset({KV_CACHE}))

    def wake_all(self) -> None:
        """Give the engine all its memory at once."""
        self._do(Move.WAKE_ALL, lambda: self._wake(WEIGHTS, KV_CACHE), asleep=frozenset())

    def refit(self, version: int) -> list[RefitRecord]:
        """Move the weights; the records have no peaks of stages yet."""
        with self._under_way.row("refit", self.state.stage):
            self._records = self._do(Move.REFIT, lambda: list(self._refit(version)), version=version)
            self._cycles += 1
            return list(self._records)

    def free_trainer(self) -> None:
        """Take the trainer's weights off the GPU."""

        def free() -> None:
            self._trainer.free()
            # In stages, the wake-up that follows does it.
            if not self.state.multi_stage:
                self._trainer.empty_cache()

        self._do(Move.FREE_TRAINER, free)

    def wake_kv_cache(self) -> None:
        """Give the KV cache memory. From here on the engine runs requests."""
        self._do(Move.WAKE_KV_CACHE, lambda: self._wake(KV_CACHE), asleep=frozenset())

    def generate(self, work: Callable[[], Result]) -> Result:
        """Do the engine's work."""
        return self._do(Move.GENERATE, work)

    def _wake(self, *tags: str) -> None:
        # The allocators' caches on both sides hold memory that the wake-up needs.
        self._trainer.empty_cache()
        self._engine.empty_cache()
        self._engine.wake(tags)

    def _do(
        self,
        move: Move,
        work: Callable[[], Result],
        *,
        asleep: frozenset[str] | None = None,
        version: int | None = None,
    ) -> Result:
        """Make one move; ``asleep`` is what the engine must say of itself afterwards."""
        with self._under_way.move(move, self.state.stage):
            self.state.require(move)
            return self._made(move, work, asleep, version)

    def _made(
        self, move: Move, work: Callable[[], Result], asleep: frozenset[str] | None, version: int | None
    ) -> Result:
        self._trainer.memory(restart=True)
        self._engine.memory(restart=True)
        start = time.perf_counter()
        try:
            result = work()
            if asleep is not None:
                self._require_asleep(asleep)
        except StageRefused as error:
            self._record(move, time.perf_counter() - start, version, self._memory_after(error), _named(error))
            raise
        except BaseException as error:  # an interrupt, too: the move is half done
            seconds = time.perf_counter() - start
            self.state = self.state.after_failure(move, error)
            found = self._memory_after(error)
            self._record(move, seconds, version, found, _named(error))
            told = f"{self.state.failed}. Stage: {self.state.stage}. {self.state.remedy}"
            if isinstance(error, Exception) and not isinstance(error, RefitError):
                raise StageFailed(f"{told}. {_told(found)}", stage=move) from error
            error.add_note(f"{told}. {_told(found)}")
            raise
        seconds = time.perf_counter() - start
        self.state = self.state.after(move)
        found = (*self._trainer.memory(), *self._engine.memory())
        self._record(move, seconds, version, found)
        return result

    def _require_asleep(self, expected: frozenset[str]) -> None:
        found = self._engine.asleep()
        if found != expected:
            raise RefitError(
                f"the engine says that of it {_listed(found)} sleeps, where {_listed(expected)} should: it passed over the "
                "call, or another caller puts it to sleep or wakes it",
                stage="memory",
            )

    def _memory_after(self, error: BaseException) -> tuple[ProcessMemory, ...]:
        """Memory of the processes that still answer. The failure may have ended some."""
        if not isinstance(error, Exception):
            return ()  # after an interrupt any process may still be at work, and would not answer
        if self._after_failure is not None:
            return tuple(self._after_failure())
        found: list[ProcessMemory] = []
        for who, side in (("trainer", self._trainer), ("engine", self._engine)):
            try:
                found += side.memory()
            except Exception as error:
                logger.warning("the memory of the %s is not known after the failure: %s", who, error)
        return tuple(found)

    def _record(
        self,
        move: Move,
        seconds: float,
        version: int | None,
        processes: tuple[ProcessMemory, ...],
        failed: str = "",
    ) -> None:
        record = StageRecord(self._cycles, move, self.state.stage, seconds, processes, version, failed)
        self._peaks[move] = max(self._peaks.get(move, 0), record.device_peak)
        if self._on_stage is not None:
            self._on_stage(record)


def _told(processes: Sequence[ProcessMemory]) -> str:
    """How much each process holds of the fullest device."""
    if not processes:
        return "No process was asked, or has answered, what memory it holds"
    fullest = max(processes, key=lambda process: process.device_peak)
    parts = ", ".join(
        f"{process.process} {process.peak_reserved / _GIB:.2f}"
        for process in processes
        if process.device == fullest.device
    )
    return (
        f"Of {fullest.device_total / _GIB:.2f} GiB of {fullest.device}, {fullest.device_peak / _GIB:.2f} were in use at the "
        f"most meanwhile (torch's allocators: {parts})"
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _listed(tags: frozenset[str]) -> str:
    return " and ".join(sorted(tags)) or "nothing"
