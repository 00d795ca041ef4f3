"""Which SGLang this is written for, and what of it is used beyond its public calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...integration.errors import RefitError

VERSION = "0.5.17"


def require_supported_sglang() -> None:
    """Refuse an SGLang whose internals differ from those that the refit goes by; called in its workers.

    Raises:
        RefitError: all that differs.
    """
    import sglang
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader import loader
    from sglang.srt.utils import patch_torch

    problems = [
        *_parameters(
            WeightUpdater.update_weights_from_tensor, "WeightUpdater", "self", "named_tensors", "load_format"
        ),
        *_parameters(loader._initialize_model, "loader", "model_config", "load_config", "quant_config"),
        *_parameters(loader._get_quantization_config, "loader", "model_config", "load_config"),
        *_parameters(ModelRunner.forward, "ModelRunner", "self", "forward_batch"),
        *_parameters(patch_torch._device_to_uuid, "patch_torch", "device"),
        *_parameters(patch_torch._rebuild_cuda_tensor_modified, "patch_torch", "args"),
    ]
    if getattr(patch_torch, "_REDUCE_TENSOR_ARG_DEVICE_INDEX", None) != 6:
        problems.append("patch_torch expects the device of a CUDA handle elsewhere")
    if not isinstance(getattr(factory, "_ROPE_DICT", None), dict):
        problems.append("rotary_embedding.factory has no _ROPE_DICT")
    if "get_model_runner" not in WeightUpdater.__dataclass_fields__:
        problems.append("WeightUpdater has no get_model_runner")
    if problems:
        raise RefitError(
            f"SGLang {sglang.__version__} differs from {VERSION}, for which rlrefit is written: {'; '.join(problems)}. "
            "Nothing was written; install sglang==0.5.17",
            stage="settings",
        )


def _parameters(function: Callable[..., Any], owner: str, *wanted: str) -> list[str]:
    found = tuple(inspect.signature(function).parameters)[: len(wanted)]
    return [] if found == wanted else [f"{owner}.{function.__name__} takes {found}, not {wanted}"]
