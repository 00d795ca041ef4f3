"""What trainer rank 0 can ask of an engine, whichever it is; the engine's process has one and calls it by name."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # its torch loads for seconds
    from .memory import Memory

# Shared by the engines' settings: enough for the prompts of the checks.
MAX_MODEL_LEN, MAX_SEQUENCES = 256, 8
Checksums = dict[str, list[int]]


class LiveEngine(ABC):
    """A running engine with random weights.

    A kind of engine adds the calls of its own weight transfer. All that is given and returned is plain data, and lists hold one
    answer for each worker.

    Args:
        settings: ``model``, ``device``, ``dtype``, ``tp``, ``pp``, ``ep``, ``gpu_memory_utilization``.
    """

    @abstractmethod
    def __init__(self, settings: dict[str, Any]): ...

    @property
    @abstractmethod
    def package(self) -> tuple[str, str]:
        """The engine's package and its version."""

    @abstractmethod
    def poison(self) -> list[int]:
        """Fill all parameters with NaN; bytes of each worker's."""

    @abstractmethod
    def checksums(self) -> list[Checksums]:
        """Of each worker's parameters, as :func:`.worker_checks.checksums`."""

    @abstractmethod
    def memory(self, restart: bool) -> list[Memory]:
        """Of each worker; ``restart`` lets the peak count anew from here."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens, with nothing cached of earlier weights."""

    @abstractmethod
    def join_refit(
        self, meeting: dict[str, Any], first_rank: int, config: dict[str, Any], engine: str
    ) -> None:
        """Have all workers meet the trainer; ``engine`` is the checkpoint engine.

        Raises:
            RefitError: of the kind that a worker raised.
        """

    @abstractmethod
    def refit(self, version: int) -> list[dict[str, Any]]:
        """Receive all weights from the trainer; the workers' records. Raises as :meth:`join_refit`."""

    @abstractmethod
    def close_refit(self) -> None:
        """End the epoch on all workers. Raises as :meth:`join_refit`."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine's processes."""

    def versions(self) -> dict[str, str]:
        """Of what runs here."""
        import torch

        name, version = self.package
        return {name: version, "torch": torch.__version__, "python": sys.version.split()[0]}
