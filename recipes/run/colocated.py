"""Refits between trainer ranks and engines that take turns on the same GPUs, and the stages around each refit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray

from ...integration.colocated.cycle import ColocatedCycle
from ...integration.colocated.memory import ProcessMemory, StageRecord
from ...integration.colocated.stages import StageFailed
from ...integration.errors import RefitError
from ...integration.records.record import RefitRecord, RefitSummary
from ...workers.engines.common.called import CalledEngine, CalledTrainer
from ..config.schema import TrainConfig
from ..policy.group import TrainerGroup
from ..refits import Refits
from ..rollout.base import RolloutGroup
from .cluster import RunError, answers_within
from .files import append_json_lines, keep_json_lines

Result = TypeVar("Result")

# Limit for all ranks together after a failure. Ranks that wait for the failed one never answer.
_ASKED_S = 3.0
_ADVICE = "The run has ended; once the cause is gone, resume=true goes on from the last checkpoint"


class LateTrainer(CalledTrainer):
    """Trainer ranks whose models are built at the first :meth:`onload`, when the engines sleep."""

    def __init__(self, trainers: TrainerGroup) -> None:
        super().__init__(trainers.call)
        self._trainers = trainers
        self._built = False

    def onload(self) -> None:
        """On all ranks."""
        if self._built:
            super().onload()
            return
        self._trainers.start()
        self._trainers.wait_until_built()
        self._built = True

    def submit_memory(self) -> list[tuple[str, ray.ObjectRef]]:
        """Ask all built ranks for their memory; :meth:`numbered` takes the answers."""
        return self._trainers.submit("memory", False) if self._built else []

    def empty_cache(self) -> None:
        """On all ranks, if they are built."""
        if self._built:
            super().empty_cache()

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """Of all ranks that are built."""
        return super().memory(restart=restart) if self._built else []


class ColocatedRefits(Refits):
    """:class:`~..refits.Refits` for trainer and engines that take turns on the same GPUs.

    Before each refit, generation and training it moves memory. Every move is a line of ``stages.jsonl``, and a step's metrics
    have the seconds and the largest device memory of its moves.

    Args:
        config: with ``generation.colocated.enabled``.
        trainers: the trainer's ranks, placed and not yet started.
        engines: the engines, built.
        records: JSON-lines file for the record of every refit and rank.
    """

    def __init__(
        self, config: TrainConfig, trainers: TrainerGroup, engines: RolloutGroup, records: Path
    ) -> None:
        self._stages_file = records.with_name("stages.jsonl")
        self._step = 0
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        super().__init__(config, trainers, engines, records)
        self._late = LateTrainer(trainers)
        self._called = CalledEngine(engines.call)
        with _run_errors():
            self._cycle = ColocatedCycle(
                self._called,
                self._late,
                self._meet_and_move,
                multi_stage_wake_up=config.generation.colocated.multi_stage_wake_up,
                on_stage=self._note,
                after_failure=self._memory_of_those_that_answer,
                advice=_ADVICE,
            )

    def begin(self, first_step: int, on_met: Callable[[dict[str, object]], None]) -> None:
        self._on_met = on_met
        self._step = first_step
        keep_json_lines(self._stages_file, lambda row: row["step"] < first_step)
        self.hand_over()

    def run(self, version: int) -> RefitSummary | None:
        self._step = version + 1
        with _run_errors():
            return self._summary(self._cycle.to_generation(version))

    def generate(self, work: Callable[[], Result]) -> Result:
        with _run_errors():
            return self._cycle.generate(work)

    def hand_over(self) -> None:
        with _run_errors():
            self._cycle.to_training()

    def train(self, work: Callable[[], Result]) -> Result:
        with _run_errors():
            return self._cycle.train(work)

    def stage_metrics(self) -> dict[str, Any]:
        seconds, self._seconds = self._seconds, {}
        peaks, self._peaks = self._peaks, {}
        return {
            **{f"stage/seconds/{move}": value for move, value in seconds.items()},
            **{f"stage/peak_bytes/{move}": value for move, value in peaks.items()},
        }

    def _meet_and_move(self, version: int) -> list[RefitRecord]:
        # Not at the start: a rank needs its weights to meet the others.
        if not self.routes:
            self._meet()
        return self._move(version)

    def _memory_of_those_that_answer(self) -> list[ProcessMemory]:
        trainers, engines = self._late.submit_memory(), self._engines.submit("memory", False)
        answers = answers_within([*trainers, *engines], _ASKED_S)
        return [
            *self._late.numbered(answers[: len(trainers)]),
            *self._called.numbered(answers[len(trainers) :]),
        ]

    def _note(self, record: StageRecord) -> None:
        append_json_lines(self._stages_file, [{"step": self._step, **record.to_json()}])
        self._seconds[record.move] = self._seconds.get(record.move, 0.0) + record.seconds
        self._peaks[record.move] = max(self._peaks.get(record.move, 0), record.device_peak)


@contextmanager
def _run_errors() -> Iterator[None]:
    """Turn the failure of a stage into a :class:`RunError` that names the stage, the memory and the remedy.

    Errors of the work between two moves, such as a reward function's, are raised unchanged.
    """
    try:
        yield
    except StageFailed as error:
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, RunError):
            raise error.__cause__ from None
        raise RunError(str(error)) from error
    except RefitError as error:
        # The cycle's notes name the stage and the remedy.
        raise RunError(" ".join([str(error), *getattr(error, "__notes__", ())])) from error
