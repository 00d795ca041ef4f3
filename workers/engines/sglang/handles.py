"""Payloads for SGLang's workers: handles of CUDA memory that name the device by its UUID, whatever number it has there.

SGLang's own way is to replace torch's reductions in the whole process (``monkey_patch_torch_reductions``), and what it puts there
can't pickle a CPU tensor: a trainer's data loaders would hang. So only these payloads are pickled its way.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def serialized(payload: Mapping[str, Any]) -> str:
    """As SGLang's ``MultiprocessingSerializer`` with its replaced reductions; those of this process stay as they are."""
    data = io.BytesIO()
    _ByUuid(data).dump(payload)
    return base64.b64encode(data.getvalue()).decode()


class _ByUuid(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        # The original, should an engine in this process have replaced it.
        reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)
        function, arguments = reduce(obj)
        if function is reductions.rebuild_cuda_tensor and isinstance(arguments[6], int):
            from sglang.srt.utils import patch_torch

            function = patch_torch._rebuild_cuda_tensor_modified
            arguments = (*arguments[:6], patch_torch._device_to_uuid(arguments[6]), *arguments[7:])
        return function, arguments
