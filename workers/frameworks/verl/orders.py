"""What a rollout worker of verl asks of the vLLM worker beside it, in place of the weights that verl would hand over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .options import EXTENSION

# A name that no weight has; a worker without the extension refuses it by this name.
ORDER = EXTENSION


@dataclass(frozen=True)
class Order:
    """One refit of one vLLM worker.

    Attributes:
        meeting: where a new epoch meets, as plain data; None to go on with the one that is open.
        rank: of this worker in the refit world.
        train_ranks: number of actors.
        version: of the weights.
        config: fields of ``RefitConfig``.
        records_dir: folder for the records; None for none.
        stays_awake: whether the engine sleeps neither in this update nor before the next one.
    """

    meeting: dict[str, Any] | None = field(repr=False)  # it holds the rendezvous' token
    rank: int
    train_ranks: int
    version: int
    config: dict[str, Any]
    records_dir: str | None
    stays_awake: bool = False

    def to_tensor(self) -> torch.Tensor:
        """As bytes that travel the way of a weight."""
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @staticmethod
    def from_tensor(raw: torch.Tensor) -> Order:
        """The order that :meth:`to_tensor` wrote."""
        return Order(**json.loads(raw.cpu().numpy().tobytes()))
