"""What every engine is put through: a trainer in a thread beside engine rank 0, and what the ranks show of themselves.

An engine comes under the contract by an :class:`Engine` of its own. Nothing here knows which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession
from tests.fp8_refits import State, differing
from tests.gpu.vllm_trainer import CheckpointSource

RANKS = 2
CONFIG = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full", transport="p2p")
# Of the two ways of a refit, each with the second checkpoint's weights, the first's, and the second's again.
WAYS, TURNS = ("nccl_xfer", "packed_broadcast"), (1, 0, 1)
# A weight that is a part of a joined parameter on all engines, and one that is a parameter by itself.
JOINED, WHOLE = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"
UNKNOWN = "model.layers.0.self_attn.unknown.weight"


@dataclass(frozen=True)
class Refusal:
    """An error, by what a caller can read of it."""

    kind: str = ""
    stage: str = ""
    parameter: str = ""
    blamed: int = -1
    text: str = ""


@dataclass
class Seen:
    """What one rank showed.

    Attributes:
        differing: parameters that don't hold what the engine's own loader makes of the checkpoint; by occasion.
        misc: names that took the misc path, by occasion.
        unused: how many weights the engine took not at all, by occasion.
        refused: errors of what was tried, by occasion.
        steps: the error of a step of generation, by occasion; its kind is empty where the engine generated.
        versions: that the engine told after each refit.
        trainer: errors of the trainer rank, by occasion.
    """

    differing: dict[str, list[str]] = field(default_factory=dict)
    misc: dict[str, set[str]] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    steps: dict[str, Refusal] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    trainer: dict[str, Refusal] = field(default_factory=dict)


class Engine(ABC):
    """One rank of an engine that was started from the first checkpoint."""

    # Whether a refit of weights that are asleep is refused on the rank, and not by a driver alone.
    guards_sleep = True

    @abstractmethod
    def held(self) -> State:
        """Bytes of all parameters, and of what is derived from them."""

    @abstractmethod
    def loaded(self, index: int) -> State:
        """The same of a second engine that loads a checkpoint itself."""

    @abstractmethod
    def poison(self) -> None:
        """NaN in all that weights are written to."""

    @abstractmethod
    def step(self) -> None:
        """Generate something; raises :class:`EngineDirty` if that must not be."""

    @abstractmethod
    def sleep(self) -> None:
        """Discard the weights as a sleep does."""

    @abstractmethod
    def wake(self) -> None:
        """Give them memory again."""

    @abstractmethod
    def computing(self, name: str) -> AbstractContextManager[object]:
        """The engine makes another value of one weight as it loads it, or has no rule for its layout."""


class SessionEngine(Engine):
    """One whose ranks meet the trainer: ``worker`` is its :class:`DestinationRefitMixin`."""

    worker: Any
    destination: type

    def sleep(self) -> None:
        self.poison()

    def wake(self) -> None:
        pass


@contextmanager
def changed_as_it_loads(model: type, name: str) -> Iterator[None]:
    """A loader that adds nothing to a weight, by an operation that no trace follows."""
    load: Callable[..., Any] = model.load_weights  # type: ignore[attr-defined]

    def load_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        changed = ((found, tensor + 0 if found == name else tensor) for found, tensor in weights)
        return load(self, changed, *args, **kwargs)

    with mock.patch.object(model, "load_weights", load_weights):
        yield


class Source(CheckpointSource):
    """One that lacks a weight, or has another one beside all."""

    def __init__(self, paths: list[str], without: str = "", beside: str = "") -> None:
        super().__init__(paths, torch.device("cpu"))
        self._left_out = without
        if beside:
            self._held[beside] = torch.ones(16, 16, dtype=torch.bfloat16)
        self._held.pop(without, None)

    def take_on(self, index: int) -> None:
        from tests.gpu.vllm_checkpoints import read_checkpoint

        for name, tensor in read_checkpoint(self._paths[index]).items():
            if name != self._left_out:
                self._held[name].copy_(tensor)


class SessionContract:
    """The contract on one of two ranks of a :class:`SessionEngine`."""

    def __init__(self, rank: int, engine: SessionEngine, paths: list[str]) -> None:
        self._rank, self._engine, self._paths = rank, engine, paths
        self._expected = [engine.loaded(index) for index in range(len(paths))]
        self._thread = ThreadPoolExecutor(1)
        self._version = 0
        self.seen = Seen()

    def run(self) -> Seen:
        self._look("as it was started", 0)
        for way in WAYS:
            with self._met(way, way):
                for index in TURNS:
                    self._refit(f"{way} {self._version}", index)
        self._refuse("lacking")
        self._refuse("unknown")
        with self._engine.computing(WHOLE), self._met("computed"):
            for index in (0, 1):
                self._refit(f"computed {self._version}", index)
        self._fail()
        self._sleep()
        return self.seen

    def _refit(self, occasion: str, index: int) -> None:
        if occasion.partition(" ")[0] in self.seen.refused:
            return
        self._engine.poison()
        if self._rank == 0:
            self._source.take_on(index)
            sending = self._thread.submit(self._session.refit, self._version)
        self._engine.worker.refit(self._version)
        if self._rank == 0:
            sending.result()
        self._look(occasion, index)
        self.seen.versions.append(self._engine.worker.refit_state.version)
        self._version += 1

    def _look(self, occasion: str, index: int) -> None:
        self.seen.differing[occasion] = differing(self._engine.held(), self._expected[index])
        self.seen.steps[occasion] = refusal_of(self._engine.step)

    def _refuse(self, occasion: str) -> None:
        """A manifest that does not fit the model; where it is refused, nothing has changed."""
        changes = {"without": JOINED} if occasion == "lacking" else {"beside": UNKNOWN}
        with self._met(occasion, **changes):
            pass
        self._look(occasion, TURNS[-1])

    def _fail(self) -> None:
        """The last rank fails when all bytes have landed."""
        broken = mock.Mock(side_effect=RefitError("broken", stage="post_load", parameter=WHOLE))
        with self._met("failing"):
            self._engine.poison()
            if self._rank == 0:
                self._source.take_on(0)
                sending = self._thread.submit(self._session.refit, self._version)
            with mock.patch.object(
                self._engine.destination,
                "finish",
                broken if self._rank == RANKS - 1 else self._engine.destination.finish,
            ):
                self.seen.refused["failing"] = refusal_of(lambda: self._engine.worker.refit(self._version))
            if self._rank == 0:
                self.seen.trainer["failing"] = refusal_of(sending.result)
        self.seen.steps["after a failure"] = refusal_of(self._engine.step)
        with self._met("mended"):
            self._refit("mended", 0)

    def _sleep(self) -> None:
        self._engine.sleep()
        self.seen.steps["asleep"] = refusal_of(self._engine.step)
        if self._engine.guards_sleep:
            self.seen.refused["asleep"] = refusal_of(lambda: self._engine.worker.refit(self._version))
        self._engine.wake()
        self.seen.steps["woken"] = refusal_of(self._engine.step)
        with self._met("slept"):
            self._refit("slept", 1)

    @contextmanager
    def _met(self, occasion: str, way: str = WAYS[0], **changes: str) -> Iterator[None]:
        """An epoch; what either side says of one that can't be is noted, and the body runs all the same."""
        told: list[Any] = [None]
        server = open_rendezvous("127.0.0.1", 1, RANKS) if self._rank == 0 else None
        if server is not None:
            told = [server.rendezvous.to_json()]
        dist.broadcast_object_list(told, 0)
        if self._rank == 0:
            self._source = Source(self._paths, **changes)
            meeting = Rendezvous.from_json(told[0])
            opening = self._thread.submit(
                RefitSession.open, meeting, 0, lambda: self._source, CONFIG, engine=way
            )
        try:
            routes = self._engine.worker.join_refit(told[0], 1 + self._rank, asdict(CONFIG), way)
            self.seen.misc[occasion] = set(routes["misc_reasons"])
            self.seen.unused[occasion] = routes["unused"]
        except RefitError as error:
            self.seen.refused[occasion] = _told(error)
        if self._rank == 0:
            try:
                self._session = opening.result()
            except RefitError as error:
                self.seen.trainer[occasion] = _told(error)
        yield
        if self._rank == 0 and occasion not in self.seen.trainer:
            self._thread.submit(self._session.close)
        self._engine.worker.close_refit()
        dist.barrier()
        if server is not None:
            server.close()


def refusal_of(call: Callable[[], object]) -> Refusal:
    """The error of a call; of no kind if there is none."""
    try:
        call()
    except RefitError as error:
        return _told(error)
    return Refusal()


def _told(error: RefitError) -> Refusal:
    return Refusal(type(error).__name__, error.stage, error.parameter, error.blamed, str(error))
