"""Trainer ranks in BF16 and the sessions that join them to an engine's ranks in FP8 blocks, in the engine's processes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from vllm_checkpoints import manifest_of

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.layout import Fragment
from rlrefit.integration.manifest import TensorSpec
from rlrefit.integration.rendezvous import Rendezvous, open_rendezvous
from rlrefit.integration.session import RefitSession

if TYPE_CHECKING:
    from rlrefit.workers.vllm.destination import VllmDestination

Tensors = dict[str, torch.Tensor]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full", transport="p2p", trainer_quantize_fp8=True)


class Halves:
    """A trainer rank that has a half of each weight's rows in BF16 where both halves are whole blocks, else all."""

    def __init__(self, rank: int, checkpoints: Sequence[Tensors]) -> None:
        self.device = torch.device("cpu")
        self._rank, self._checkpoints = rank, checkpoints
        self._now = checkpoints[0]
        self._held = {name: self._part(tensor).clone() for name, tensor in self._now.items()}

    def take_on(self, index: int) -> None:
        self._now = self._checkpoints[index]
        for name, tensor in self._now.items():
            self._held[name].copy_(self._part(tensor))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(*entry) for entry in manifest_of(self._now)]

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        found = []
        for name, part in self._held.items():
            shape = tuple(self._now[name].shape)
            start = self._rank * part.shape[0] if part.shape[0] < shape[0] else 0
            box = ((start, start + part.shape[0]), *((0, n) for n in shape[1:]))
            found.append(Fragment(name, shape, box, part))
        return found, {}

    def settle(self) -> None:
        pass

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._now[name]) for name in names)

    def storage_key(self) -> Hashable:
        return tuple(part.data_ptr() for part in self._held.values())

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        half, rest = divmod(tensor.shape[0], 2)
        return tensor if rest or half % 128 else tensor[self._rank * half : (self._rank + 1) * half]


class Sessions:
    """This process as an engine rank of a refit, and beside it, in a thread, as a trainer rank."""

    def __init__(
        self, rank: int, engine: str, checkpoints: Sequence[Tensors], destination: VllmDestination
    ) -> None:
        told: list[Any] = [None]
        self._server = open_rendezvous("127.0.0.1", 2, 2) if rank == 0 else None
        if self._server is not None:
            told = [self._server.rendezvous.to_json()]
        torch.distributed.broadcast_object_list(told, 0)
        self._source = Halves(rank, checkpoints)
        self._thread = ThreadPoolExecutor(1)
        meeting = Rendezvous.from_json(told[0])
        opening = self._thread.submit(
            RefitSession.open, meeting, rank, lambda: self._source, CONFIG, engine=engine
        )
        self._engine = RefitSession.open(meeting, 2 + rank, lambda: destination, CONFIG, engine=engine)
        self._trainer = opening.result()

    def routes(self) -> dict[str, int]:
        return {route: len(self._engine.manifest.specs(route)) for route in ("bulk", "misc", "unused")}

    def refit(self, index: int, version: int) -> None:
        self._source.take_on(index)
        sending = self._thread.submit(self._trainer.refit, version)
        self._engine.refit(version)
        sending.result()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        closing = self._thread.submit(self._trainer.close)
        self._engine.close()
        closing.result()
        self._thread.shutdown()
        torch.distributed.barrier()
        if self._server is not None:
            self._server.close()
