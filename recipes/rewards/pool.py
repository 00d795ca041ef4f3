"""Reward functions in parallel processes, with a time limit for each answer."""

from __future__ import annotations

import logging
import multiprocessing as mp
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from .scorer import Answer, RewardError, RewardScorer, Scores, load_reward

logger = logging.getLogger(__name__)

# Seconds for a process to load the reward function's modules.
_LOADING_S = 300.0
# And for one to end that has closed its pipe; it is killed then.
_ENDING_S = 10.0
_READY = "ready"


@dataclass(eq=False)
class _Worker:
    """A process and what it is at.

    Attributes:
        process: the process.
        pipe: to it.
        answer: index of the answer that it judges; None while it loads.
        deadline: of that, by ``time.monotonic``.
    """

    process: Any
    pipe: Connection
    answer: int | None
    deadline: float


class RewardPool:
    """Judges answers in processes that each load the reward function themselves.

    Args:
        spec: of the function, as for :func:`.scorer.load_reward`.
        kwargs: keyword arguments that it gets on every call.
        processes: how many.
        timeout_s: seconds for one answer; one that takes longer is worth 0, and its process is replaced.
    """

    def __init__(self, spec: str, kwargs: Mapping[str, Any], processes: int, timeout_s: float) -> None:
        self._arguments = (spec, dict(kwargs))
        self._timeout_s = timeout_s
        # They come up while the engines start.
        self._workers = [self._start() for _ in range(processes)]
        self._idle: list[_Worker] = []

    def score_all(self, answers: Sequence[Answer]) -> Scores:
        """The rewards of all answers, in order.

        Raises:
            RewardError: as of :class:`.scorer.RewardScorer`; or a process ended by itself, or could not load the function. The
                processes are ended then.
        """
        try:
            return self._score_all(answers)
        except RewardError:
            self.close()  # what the others are at would be taken for answers of the next call
            raise

    def _score_all(self, answers: Sequence[Answer]) -> Scores:
        values = [0.0] * len(answers)
        waiting, left, overtime = deque(range(len(answers))), len(answers), 0
        while left:
            while waiting and self._idle:
                self._give(self._idle.pop(), waiting.popleft(), answers)
            busy = {worker.pipe: worker for worker in self._workers if worker not in self._idle}
            first = min(worker.deadline for worker in busy.values())
            for pipe in wait(list(busy), max(0.0, first - time.monotonic())):
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                found = self._received(worker, answers)
                if worker.answer is not None:
                    values[worker.answer] = found
                    left -= 1
                self._idle.append(worker)
            for worker in busy.values():
                if time.monotonic() > worker.deadline:
                    self._replace(worker, answers)
                    left -= 1
                    overtime += 1
        return Scores(values, overtime)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers, self._idle = [], []

    def _start(self) -> _Worker:
        # Not forked: this process has threads, of Ray's and torch's.
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_judge, args=(theirs, *self._arguments), daemon=True)
        # Or it would start with the first process, and unblock interrupts as it does.
        resource_tracker.ensure_running()
        # A new process inherits the mask, so that an interrupt cannot end it before _judge ignores interrupts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return _Worker(process, ours, None, time.monotonic() + _LOADING_S)

    def _give(self, worker: _Worker, index: int, answers: Sequence[Answer]) -> None:
        answer = answers[index]
        worker.answer, worker.deadline = index, time.monotonic() + self._timeout_s
        try:
            # Without its tokens, which no reward is given.
            worker.pipe.send(replace(answer, prompt=replace(answer.prompt, token_ids=())))
        except OSError as error:
            raise self._ended(worker, answers) from error

    def _received(self, worker: _Worker, answers: Sequence[Answer]) -> Any:
        try:
            found = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended(worker, answers) from error
        if isinstance(found, RewardError):
            raise found
        return found

    def _ended(self, worker: _Worker, answers: Sequence[Answer]) -> RewardError:
        worker.process.join(_ENDING_S)
        what = "as it loaded the reward function"
        if worker.answer is not None:
            answer = answers[worker.answer]
            what = f"at the record of {answer.prompt.origin} and a completion of {len(answer.completion)} characters"
        return RewardError(
            f"a process of reward {self._arguments[0]} ended by itself (exit code {worker.process.exitcode}) {what}. The step "
            "was given up; mend the function, or see that the host's memory suffices for reward.processes"
        )

    def _replace(self, worker: _Worker, answers: Sequence[Answer]) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        if worker.answer is None:
            raise RewardError(
                f"a process of reward {self._arguments[0]} did not load the function within {_LOADING_S:.0f} s; see what its "
                "module does as it is imported"
            )
        answer = answers[worker.answer]
        logger.warning(
            "reward %s took more than %g s for the record at %s and a completion of %d characters: it is worth 0",
            self._arguments[0],
            self._timeout_s,
            answer.prompt.origin,
            len(answer.completion),
        )
        self._workers[self._workers.index(worker)] = self._start()


def _judge(pipe: Connection, spec: str, kwargs: Mapping[str, Any]) -> None:
    """What a process does, in its main thread, where a function may set alarms of its own."""
    # An interrupt is for the driver, which finishes its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        scorer = RewardScorer(load_reward(spec, kwargs))
    except RewardError as error:
        pipe.send(error)
        return
    pipe.send(_READY)
    while True:
        try:
            answer: Answer = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(scorer(answer.prompt, answer.completion, answer.finished))
        except RewardError as error:
            pipe.send(error)
