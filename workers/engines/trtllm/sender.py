"""A trainer rank as the sender of weights to TensorRT-LLM engines on the trainer's own GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ....integration.quantize.nvfp4_checkpoint import fused_module
from ....integration.weights.endpoints import WeightSource
from ...trainers.qat.model import QAT
from ..common.bucket_sender import BucketSender, Engines
from .payload import Reduce, cuda_handle, encode

_SUFFIXES = ("weight", "bias", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")


def unit_of(name: str) -> str:
    """What has to reach the loader in one call: the weights that the engine joins in one matrix, with all their scales.

    TensorRT-LLM's methods for quantized layers take part of a joined matrix only if they support it: in several versions
    NVFP4 does not, whatever the model's ``allow_partial_loading`` says.
    """
    module, _, kind = name.rpartition(".")
    return fused_module(f"{module}.weight") if module and kind in _SUFFIXES else name


class TrtllmSender(BucketSender):
    """Sends all weights of a source to TensorRT-LLM engines; one on every trainer rank.

    Args:
        source: of the weights as the engines load them: a trainer's own, a
            :class:`~rlrefit.integration.weights.quantizing.QuantizingSource` around it for engines that hold block-scaled FP8, or
            :class:`~...trainers.qat.source.PackedSource` for NVFP4.
        engines: a :class:`~.driver.TrtllmDriver`, or a proxy of one; on rank 0 of ``group``, None on the others.
        device: UUID of this rank's GPU, :func:`~..common.bucket_sender.own_device`.
        bucket_bytes: as :class:`BucketSender`'s.
        group: as :class:`BucketSender`'s.
        reduce: makes handles.
        qat: as :class:`BucketSender`'s.
    """

    _engine_name = "trtllm"
    _unit_of = staticmethod(unit_of)

    def __init__(
        self,
        source: WeightSource,
        engines: Engines | None,
        device: str,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
        reduce: Reduce = cuda_handle,
        qat: QAT | None = None,
    ) -> None:
        super().__init__(source, engines, device, bucket_bytes, group, qat)
        self._reduce = reduce

    def _encoded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> str:
        return encode(weights, self._reduce)
