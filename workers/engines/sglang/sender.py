"""A trainer rank as the sender of weights to an SGLang engine on the trainer's own GPUs, in SGLang's flattened buckets."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from ....integration.config import RefitConfig
from ....integration.quantize.formats import Format, Fp8Blockwise
from ....integration.records.record import RefitRecord
from ....integration.weights.endpoints import WeightSource
from ....integration.weights.manifest import TensorSpec
from ...trainers.qat.model import QAT
from ..common.bucket_sender import BucketSender
from .driver import SglangRefit
from .pausing import PauseMode

# A bucket is held twice: as copies of the export, and flattened.
_COPIES = 2


class SglangSender(BucketSender):
    """Sends all weights of a source to an SGLang engine; one on every trainer rank.

    Each rank that shares a GPU with a worker flattens its bucket with SGLang's own ``FlattenedTensorBucket`` and serializes
    it as SGLang does: as bytes with their dtypes beside them, so that float8 travels too.

    Args:
        source: of the weights as the engine loads them, or unquantized with one of the keys below.
        engines: an :class:`SglangRefit`, or a proxy of one; on rank 0 of ``group``, None on the others.
        device: UUID of this rank's GPU, :func:`~..common.bucket_sender.own_device`; ``cpu`` where both are on one host's
            CPUs.
        bucket_bytes: of all that is held for a bucket at a time; a larger weight gets a bucket of its own.
        group: as :class:`BucketSender`'s.
        trainer_quantize_fp8: as ``policy.refit.trainer_quantize_fp8``: each rank makes codes and scales of the weights that the
            engine holds in FP8 blocks. An engine that holds none is a ``RefitMismatch``.
        trainer_quantize_int4: the same of INT4.
        int4_scale: as ``policy.refit.int4_scale``.
        qat: as :class:`BucketSender`'s.

    Raises:
        ValueError: both keys are given, or no such rule.
    """

    _engine_name = "sglang"

    def __init__(
        self,
        source: WeightSource,
        engines: SglangRefit | None,
        device: str,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
        trainer_quantize_fp8: bool = False,
        trainer_quantize_int4: bool = False,
        int4_scale: str = RefitConfig.int4_scale,
        qat: QAT | None = None,
    ) -> None:
        super().__init__(source, engines, device, bucket_bytes // _COPIES, group, qat)
        self._config = RefitConfig(
            trainer_quantize_fp8=trainer_quantize_fp8,
            trainer_quantize_int4=trainer_quantize_int4,
            int4_scale=int4_scale,
        )
        self._mode: PauseMode = "wait"

    def refit(self, version: int, mode: PauseMode = "wait") -> RefitRecord:
        """As :meth:`BucketSender.refit`.

        Args:
            version: the same on all ranks.
            mode: what becomes of running requests, as :meth:`SglangRefit.refit`'s; the leader's counts.
        """
        self._mode = mode
        return super().refit(version)

    @staticmethod
    def _unit_of(name: str) -> str:
        # SGLang's loaders take each weight by itself, with the scales that give its codes a value.
        return name.removesuffix(Fp8Blockwise.scale_name_end)

    def _begun(self, engines: SglangRefit, version: int, specs: Sequence[TensorSpec]) -> Mapping[str, Format]:
        trained = None
        if self._config.quantized_in_transit:
            # What is made in transit the engine alone can tell.
            trained = self._trained() or None
        else:
            self._require_sent_as_trained()
        return engines.begin(version, specs, self._mode, self._config, trained)

    def _encoded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> str:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        # Wide numbers first: SGLang views each one where it lies, at an address that has to be a multiple of its width.
        ordered = sorted(weights, key=lambda weight: -weight[1].element_size())
        bucket = FlattenedTensorBucket(named_tensors=ordered)
        self._flattened = bucket.get_flattened_tensor()
        return serialized({"flattened_tensor": self._flattened, "metadata": bucket.get_metadata()})


def serialized(payload: Mapping[str, Any]) -> str:
    """A payload as SGLang's ``MultiprocessingSerializer`` makes it: handles of CUDA memory name the device by its UUID.

    SGLang replaces torch's reductions in the whole process for that (``monkey_patch_torch_reductions``). Its replacement
    can't pickle a CPU tensor, so a trainer's data loaders would hang. Here only the payload is pickled so.
    """
    data = io.BytesIO()
    _ByUuid(data).dump(payload)
    return base64.b64encode(data.getvalue()).decode()


class _ByUuid(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        # The original, in case an engine in this process has replaced it.
        reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)
        function, arguments = reduce(obj)
        if function is reductions.rebuild_cuda_tensor and isinstance(arguments[6], int):
            from sglang.srt.utils import patch_torch

            function = patch_torch._rebuild_cuda_tensor_modified
            arguments = (*arguments[:6], patch_torch._device_to_uuid(arguments[6]), *arguments[7:])
        return function, arguments
