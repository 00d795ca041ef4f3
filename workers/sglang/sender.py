"""A trainer rank as the sender of weights to SGLang engines on the trainer's own GPUs, by SGLang's flattened buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ...integration.endpoints import WeightSource
from ...integration.manifest import TensorSpec
from ...integration.records import RefitRecord
from ..trtllm.buckets import Bucket
from ..trtllm.sender import Engines, TrtllmSender
from .handles import serialized
from .pausing import PauseMode

# A bucket is held twice: as copies of the export, and flattened.
_COPIES = 2


class PausedEngines(Engines, Protocol):
    """What the leader calls; :class:`~.driver.SglangRefit`, or a proxy of one in another process."""

    def begin(self, version: int, specs: Sequence[TensorSpec], mode: PauseMode = "wait") -> None:
        """As :meth:`Engines.begin`, and ``mode`` is what becomes of running requests."""


class SglangSender(TrtllmSender):
    """Sends all weights of a source to an SGLang engine; on every trainer rank, as :class:`~..trtllm.sender.TrtllmSender`.

    Each rank that shares a GPU with a worker flattens its bucket with SGLang's own ``FlattenedTensorBucket`` and serializes
    it as SGLang does, as bytes with their dtypes beside them, so that float8 travels too. The leader orders the payloads by the workers' GPUs. Rank 0 of ``group`` has the engine's :class:`~.driver.SglangRefit`.

    Args:
        source: of the weights as the engine loads them.
        engines: on rank 0 of ``group``; None on the others.
        device: UUID of this rank's GPU, :func:`~..trtllm.sender.own_device`; ``cpu`` where both are on one host's CPUs.
        bucket_bytes: of all that is held for a bucket at a time; a larger weight gets a bucket of its own.
        group: of all trainer ranks, on host memory, with the timeout that bounds each wait; None for one rank.
    """

    _engine_name = "sglang"
    # SGLang's loaders take each tensor by itself.
    _unit_of = staticmethod(str)

    def __init__(
        self,
        source: WeightSource,
        engines: PausedEngines | None,
        device: str,
        bucket_bytes: int,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(source, engines, device, bucket_bytes // _COPIES, group)
        self._mode: PauseMode = "wait"
        self._flattened: torch.Tensor | None = None

    def refit(self, version: int, mode: PauseMode = "wait") -> RefitRecord:
        """As :meth:`~..trtllm.sender.TrtllmSender.refit`; nothing of the last bucket stays.

        Args:
            version: the same on all ranks.
            mode: what becomes of running requests, as :meth:`~.driver.SglangRefit.refit`'s; the leader's counts.
        """
        self._mode = mode
        try:
            return super().refit(version)
        finally:
            self._flattened = None
            if self._source.device.type == "cuda":
                torch.cuda.ipc_collect()

    def _begun(self, engines: PausedEngines, version: int, specs: Sequence[TensorSpec]) -> frozenset[str]:
        engines.begin(version, specs, self._mode)
        return frozenset(engines.devices)

    def _send(
        self,
        export: Iterator[tuple[str, torch.Tensor]],
        specs: Sequence[TensorSpec],
        bucket: Bucket,
        held: dict[str, torch.Tensor] | None,
    ) -> tuple[int, int]:
        nbytes, peak = super()._send(export, specs, bucket, held)
        # The engine has answered, so nobody reads it any more.
        flattened, self._flattened = self._flattened, None
        return nbytes, peak + (0 if flattened is None else flattened.nbytes)

    def _encoded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> str:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        # Wide numbers first: SGLang views each one where it lies, which has to be a multiple of its width.
        ordered = sorted(weights, key=lambda weight: -weight[1].element_size())
        bucket = FlattenedTensorBucket(named_tensors=ordered)
        # The memory that the payload refers to.
        self._flattened = bucket.get_flattened_tensor()
        return serialized({"flattened_tensor": self._flattened, "metadata": bucket.get_metadata()})
