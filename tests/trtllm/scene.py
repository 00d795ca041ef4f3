"""A trainer rank and its engines, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlrefit.workers.engines.trtllm.driver import TrtllmDriver
from rlrefit.workers.engines.trtllm.payload import encode
from rlrefit.workers.engines.trtllm.sender import TrtllmSender

from .engine_double import DoubleLLM, answered, expected
from .host_memory import host_handle
from .package_double import get_device_uuid
from .sources import ListSource, some_weights

DEVICE = get_device_uuid(0)


class Scene:
    """
    Attributes:
        llms: engines of one worker each, on GPUs that count up from 0; the trainer rank runs on the first.
    """

    def __init__(
        self,
        extension: type,
        *,
        weights: dict[str, torch.Tensor] | None = None,
        bucket_bytes: int = 600,
        engines: int = 1,
        **options: Any,
    ) -> None:
        self.source = ListSource(weights or some_weights())
        specs = self.source.specs()
        self.llms = [DoubleLLM(extension, specs, first=i, **options) for i in range(engines)]
        self.workers = [worker for llm in self.llms for worker in llm.workers]
        self.worker = self.workers[0]
        self.driver = TrtllmDriver(*self.llms, wait=answered)
        self.sender = TrtllmSender(self.source, self.driver, DEVICE, bucket_bytes, reduce=host_handle)

    def handles(
        self, names: Sequence[str] | None = None, changed: dict[str, torch.Tensor] | None = None
    ) -> dict[str, str]:
        """A bucket for all workers."""
        weights = {name: self.source.weights[name] for name in names or self.source.weights} | (changed or {})
        return {
            get_device_uuid(worker.device_id): encode(
                [(name, tensor.clone()) for name, tensor in weights.items()], host_handle
            )
            for worker in self.workers
        }

    def check(self) -> None:
        for worker in self.workers:
            assert worker.held() == expected(self.source.weights)
