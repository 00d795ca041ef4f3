"""Trainer ranks and engines in other processes as the cycle sees them: by whatever way their methods are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....integration.colocated.memory import ProcessMemory

# (method, its arguments) → what each of the processes returned, in the order of ranks; called on all at once.
Call = Callable[..., Sequence[Any]]


class _Called:
    _kind = ""

    def __init__(self, call: Call) -> None:
        self._call = call

    def empty_cache(self) -> None:
        """On all of them."""
        self._call("empty_cache")

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """Of all of them, numbered through; their own ``memory`` takes ``restart`` by position."""
        return self.numbered(self._call("memory", restart))

    def numbered(self, answers: Sequence[Sequence[ProcessMemory] | None]) -> list[ProcessMemory]:
        """What their ``memory`` returned, with the ranks' numbers; None of those that did not answer.

        Each speaks for as many ranks as the others.
        """
        each = max((len(answer) for answer in answers if answer is not None), default=0)
        return [
            replace(process, process=f"{self._kind} rank {first * each + i}")
            for first, answer in enumerate(answers)
            for i, process in enumerate(answer or ())
        ]


class CalledTrainer(_Called):
    """A :class:`~rlrefit.integration.colocated.stages.ColocatedTrainer` whose ranks each have its methods.

    Args:
        call: on all ranks at once; raises what a rank raised.
    """

    _kind = "trainer"

    def onload(self) -> None:
        """On all ranks."""
        self._call("onload")

    def offload(self) -> None:
        """On all ranks."""
        self._call("offload")

    def free(self) -> None:
        """On all ranks."""
        self._call("free")


class CalledEngine(_Called):
    """A :class:`~rlrefit.integration.colocated.stages.SleepingEngine` whose replicas each have its methods.

    Args:
        call: on all replicas at once; raises what a replica raised. It may raise ``StageRefused`` only if no replica
            has changed.
    """

    _kind = "engine"

    def sleep(self, level: int) -> None:
        """On all replicas."""
        self._call("sleep", level)

    def wake(self, tags: Sequence[str]) -> None:
        """On all replicas."""
        self._call("wake", list(tags))

    def asleep(self) -> frozenset[str]:
        """On any replica."""
        return frozenset().union(*self._call("asleep"))
