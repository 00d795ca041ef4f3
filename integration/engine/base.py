"""Checkpoint engines: how weights get from a trainer's ranks into an engine's, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..records.record import StageClock
from ..weights.endpoints import WeightDestination, WeightSource
from ..weights.manifest import Manifest


@dataclass(frozen=True)
class SendResult:
    """What one rank moved in one refit, in bytes; ``void`` if all of it counts for nothing, and has to be moved again."""

    bytes_bulk: int
    bytes_misc: int
    bytes_verified: int
    void: bool = False


class CheckpointEngine(ABC):
    """Lifecycle: ``prepare`` → ``init_process_group`` → (``send_weights`` | ``receive_weights``)* → ``finalize``.

    ``prepare`` and ``init_process_group`` run once per epoch, on all ranks at the same time.
    """

    name: str

    def __init__(self, config: RefitConfig, world: RefitWorld, channel: Channel):
        self.config = config
        self.world = world
        self.channel = channel

    @abstractmethod
    def prepare(self, endpoint: WeightSource | WeightDestination) -> Manifest:
        """Learn what exists on all ranks and agree on it.

        Raises:
            RefitMismatch: ranks disagree; names the first weight that differs.
            PlanError: bytes that nobody sends or two would write.
        """

    @abstractmethod
    def init_process_group(self) -> None:
        """Make communicators and buffers."""

    def stale(self) -> bool:
        """Whether storage on this rank has moved since it was bound; asked at the beginning of each refit."""
        return False

    def rebind(self) -> None:  # noqa: B027  # an engine that holds no views has nothing to follow
        """Follow moved storages. A collective: called on all ranks if any is stale, before the engine is dirty.

        Raises:
            RefitMismatch: on every rank, if a weight changed on any beyond its place: its shape, its box or its dtype.
        """

    @abstractmethod
    def send_weights(self, version: int, clock: StageClock) -> SendResult:
        """Trainer ranks: send all weights once."""

    @abstractmethod
    def receive_weights(self, version: int, clock: StageClock) -> SendResult:
        """Generation ranks: receive all weights once, into live storage or the engine's loader."""

    def require_finite(self) -> None:  # noqa: B027  # an engine that quantizes nothing has nothing to refuse
        """Generation ranks, once the device has done a refit's work and before it commits: refuse weights that are no numbers.

        Raises:
            RefitError: names the first such weight.
        """

    @abstractmethod
    def finalize(self, *, failed: bool = False) -> None:
        """Close communicators and free buffers; safe to call twice. ``failed``: peers may be gone."""

    @property
    @abstractmethod
    def transport_name(self) -> str:
        """What carries the bulk of the bytes, for records."""

    @property
    def transport_reason(self) -> str:
        """Why it is that one, for the log; nothing where no other could be."""
        return ""

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of buffers on this rank at their largest."""

    @property
    def held_bytes(self) -> int:
        """Those of :attr:`staging_bytes` that are held between refits; the others are taken anew in each."""
        return 0


EngineFactory = Callable[[RefitConfig, RefitWorld, Channel], CheckpointEngine]
_REGISTRY: dict[str, EngineFactory] = {}


def register_engine(name: str, factory: EngineFactory) -> None:
    """Make an engine known under ``name``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _REGISTRY:
        raise ValueError(f"a checkpoint engine {name!r} is registered already; choose another name")
    _REGISTRY[name] = factory


def make_engine(name: str, config: RefitConfig, world: RefitWorld, channel: Channel) -> CheckpointEngine:
    """An engine by its registered name.

    Raises:
        ValueError: no engine has that name; lists those that exist.
    """
    if name not in _REGISTRY:
        raise ValueError(f"there is no checkpoint engine {name!r}; there are {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name](config, world, channel)
