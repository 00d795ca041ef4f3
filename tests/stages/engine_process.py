"""An engine in a process of its own: real tensors, a real refit session, and memory that it gives back and takes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlrefit.integration.colocated.memory import MemoryWatch, ProcessMemory, empty_cache
from rlrefit.integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import Layout, SyntheticDestination

CPU = torch.device("cpu")
# 16 MiB and a small one.
SPECS = [TensorSpec("w", (512, 4096), torch.float64), TensorSpec("norm", (4096,), torch.bfloat16)]
WHOLE: Layout = {spec.name: [tuple((0, n) for n in spec.shape)] for spec in SPECS}
WEIGHTS_BYTES, KV_BYTES = 16 << 20, 24 << 20
# Its wire is memory of the host, here as on a GPU.
ENGINE = "colocated_ipc"
CONFIG = RefitConfig(bucket_mb=4, timeout_s=20.0, verify="full", transport="p2p")


class Mapped:
    """A tensor whose memory can be given back and taken again at its address, as sleep mode does with a GPU's."""

    def __init__(self, like: torch.Tensor) -> None:
        nbytes = like.numel() * like.itemsize
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._memory, dtype=like.dtype).view(like.shape)
        self.tensor.copy_(like)

    def release(self) -> None:
        """Its values are gone."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def mapped(storages: dict[Any, torch.Tensor]) -> list[Mapped]:
    """Put mapped memory in the place of an endpoint's storages."""
    found = {key: Mapped(tensor) for key, tensor in storages.items()}
    storages.update({key: memory.tensor for key, memory in found.items()})
    return list(found.values())


class Engine:
    """What the cycle calls; each method that ``CalledEngine`` has."""

    def __init__(self) -> None:
        self._state = ServingState()
        self._watch = MemoryWatch(CPU)
        self._session: RefitSession | None = None
        self._destination = SyntheticDestination(SPECS, WHOLE)
        self._weights = mapped(self._destination._wanted)
        self._kv_cache = Mapped(torch.ones(KV_BYTES, dtype=torch.uint8))
        self._asleep: set[str] = set()

    def sleep(self, level: int) -> None:
        assert level == 2
        self._state.mark_dirty(-1)
        for memory in (*self._weights, self._kv_cache):
            memory.release()
        self._asleep = set(TAGS)

    def wake(self, tags: Sequence[str]) -> None:
        if WEIGHTS in tags:
            self._destination.poison()
        if KV_CACHE in tags:
            self._kv_cache.tensor.fill_(1)
        self._asleep -= set(tags)

    def asleep(self) -> frozenset[str]:
        return frozenset(self._asleep)

    def empty_cache(self) -> None:
        empty_cache(CPU)

    def memory(self, restart: bool) -> list[ProcessMemory]:
        found = self._watch.read("engine rank 0")
        if restart:
            self._watch.restart()
        return [found]

    def join(self, rendezvous: dict[str, Any]) -> None:
        self._session = RefitSession.open(
            Rendezvous.from_json(rendezvous),
            1,
            lambda: self._destination,
            CONFIG,
            state=self._state,
            engine=ENGINE,
        )

    def refit(self, version: int) -> dict[str, Any]:
        if WEIGHTS in self._asleep:
            raise RefitError("the weights are asleep", stage="handshake")
        assert self._session is not None
        return self._session.refit(version).to_json()

    def generate(self) -> tuple[int, list[str]]:
        """Version, and weights that are not its."""
        if self._asleep:
            raise EngineDirty("a part is asleep", stage="generate")
        self._state.require_clean()
        return self._state.version, self._destination.wrong(self._state.version)


def engine_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    engine = Engine()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(engine, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


def caller(pipe: Connection) -> Callable[..., list[Any]]:
    """Calls in the one process behind ``pipe``."""

    def call(method: str, *arguments: Any) -> list[Any]:
        pipe.send((method, arguments))
        return [answer(pipe)]

    return call


def answer(pipe: Connection) -> Any:
    """What the call under way returns."""
    succeeded, value = pipe.recv()
    if not succeeded:
        raise value
    return value
