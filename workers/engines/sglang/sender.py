"""A trainer rank as the sender of weights to SGLang engines on the trainer's own GPUs, by SGLang's flattened buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from ....integration.quantize.formats import Format, Fp8Blockwise
from ....integration.records.record import RefitRecord
from ....integration.weights.endpoints import WeightSource
from ....integration.weights.manifest import TensorSpec
from ....integration.weights.quantizing import QuantizingSource
from ....integration.weights.scale_watch import ScaleWatch
from ..trtllm.buckets import Bucket
from ..trtllm.sender import Engines, TrtllmSender
from .handles import serialized
from .pausing import PauseMode

# A bucket is held twice: as copies of the export, and flattened.
_COPIES = 2


class PausedEngines(Engines, Protocol):
    """What the leader calls; :class:`~.driver.SglangRefit`, or a proxy of one in another process."""

    def begin(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        mode: PauseMode = "wait",
        trainer_quantize_fp8: bool = False,
    ) -> Mapping[str, Format]:
        """As :meth:`Engines.begin`, and ``mode`` is what becomes of running requests.

        Returns:
            Those of ``specs`` that the engine wants as codes and scales; none without ``trainer_quantize_fp8``.
        """


def unit_of(name: str) -> str:
    """What travels in one bucket: a weight and its scales, with which alone its codes are numbers."""
    return name.removesuffix(Fp8Blockwise.scale_name_end)


class _Quantizing(QuantizingSource):
    """Ends its export with an error where a weight held a NaN or infinity, of which no scale can be made."""

    def __init__(self, source: WeightSource, formats: Mapping[str, Format], rank: int) -> None:
        super().__init__(source, formats)
        self._watch = ScaleWatch(formats, rank)
        self._watch.bind((), self.specs(), self.device)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._watch.passing(super().export(names))
        self._watch.look()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._watch.require_finite()


class SglangSender(TrtllmSender):
    """Sends all weights of a source to an SGLang engine; on every trainer rank, as :class:`~..trtllm.sender.TrtllmSender`.

    Each rank that shares a GPU with a worker flattens its bucket with SGLang's own ``FlattenedTensorBucket`` and serializes
    it as SGLang does, as bytes with their dtypes beside them, so that float8 travels too. The leader orders the payloads by the workers' GPUs. Rank 0 of ``group`` has the engine's :class:`~.driver.SglangRefit`.

    Args:
        source: of the weights as the engine loads them, or unquantized with ``trainer_quantize_fp8``.
        engines: on rank 0 of ``group``; None on the others.
        device: UUID of this rank's GPU, :func:`~..trtllm.sender.own_device`; ``cpu`` where both are on one host's CPUs.
        bucket_bytes: of all that is held for a bucket at a time; a larger weight gets a bucket of its own.
        group: of all trainer ranks, on host memory, with the timeout that bounds each wait; None for one rank.
        trainer_quantize_fp8: as ``policy.refit.trainer_quantize_fp8``: each rank makes codes and scales of the weights that the
            engine says to hold in FP8 blocks. An engine that holds none is a ``RefitMismatch``.
    """

    _engine_name = "sglang"
    # SGLang's loaders take each tensor by itself.
    _unit_of = staticmethod(unit_of)

    def __init__(
        self,
        source: WeightSource,
        engines: PausedEngines | None,
        device: str,
        bucket_bytes: int,
        group: torch.distributed.ProcessGroup | None = None,
        trainer_quantize_fp8: bool = False,
    ) -> None:
        super().__init__(source, engines, device, bucket_bytes // _COPIES, group)
        self._quantizes = trainer_quantize_fp8
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

    def _begun(
        self, engines: PausedEngines, version: int, specs: Sequence[TensorSpec]
    ) -> Mapping[str, Format]:
        return engines.begin(version, specs, self._mode, self._quantizes)

    def _sending(self, formats: Mapping[str, Format]) -> WeightSource:
        return _Quantizing(self._source, formats, self._rank) if formats else self._source

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
