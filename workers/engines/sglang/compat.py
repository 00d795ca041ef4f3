"""Which SGLang this is written for, and what of it is used beyond its public calls."""

from __future__ import annotations

import inspect
from typing import Any

VERSION = "0.5.17"


def is_supported(version: str) -> bool:
    """Whether an SGLang says to be the one; a local build's suffix is nothing of it."""
    return version.partition("+")[0] == VERSION


def differences() -> str:
    """All in which this SGLang's internals differ from those that the refit goes by, as text; asked in its workers."""
    import sglang

    try:
        from sglang.srt.layers.rotary_embedding import factory
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.model_loader import loader
        from sglang.srt.utils import patch_torch
        from sglang.utils import TypeBasedDispatcher
    except ImportError as error:
        return _text(sglang.__version__, [str(error)])

    problems = [
        *_parameters(WeightUpdater, "update_weights_from_tensor", "self", "named_tensors", "load_format"),
        *_parameters(loader, "_initialize_model", "model_config", "load_config", "quant_config"),
        *_parameters(loader, "_get_quantization_config", "model_config", "load_config"),
        *_parameters(ModelRunner, "forward", "self", "forward_batch"),
        *_parameters(Scheduler, "process_input_requests", "self", "recv_reqs"),
        *_attributes(Scheduler, "init_request_dispatcher", "_request_dispatcher", "get_internal_state"),
        *_attributes(Scheduler, "init_weight_updater", "weight_updater"),
        *_attributes(Scheduler, "pause_generation", "_engine_paused"),
        *_attributes(Scheduler, "continue_generation", "_engine_paused"),
        *_attributes(SchedulerWeightUpdaterManager, "release_memory_occupation", "offload_tags"),
        *_attributes(SchedulerWeightUpdaterManager, "resume_memory_occupation", "offload_tags"),
        *_attributes(TypeBasedDispatcher, "__init__", "_mapping"),
        *_parameters(patch_torch, "_device_to_uuid", "device"),
        *_parameters(patch_torch, "_rebuild_cuda_tensor_modified", "args"),
    ]
    if getattr(patch_torch, "_REDUCE_TENSOR_ARG_DEVICE_INDEX", None) != 6:
        problems.append("patch_torch expects the device of a CUDA handle elsewhere")
    if not isinstance(getattr(factory, "_ROPE_DICT", None), dict):
        problems.append("rotary_embedding.factory has no _ROPE_DICT")
    if "get_model_runner" not in getattr(WeightUpdater, "__dataclass_fields__", ()):
        problems.append("WeightUpdater has no get_model_runner")
    return _text(sglang.__version__, problems) if problems else ""


def _text(version: str, problems: list[str]) -> str:
    return (
        f"SGLang {version} differs from {VERSION}, for which rlrefit is written: {'; '.join(problems)}. Nothing was written; "
        f"install sglang=={VERSION}"
    )


def _parameters(owner: Any, name: str, *wanted: str) -> list[str]:
    function = getattr(owner, name, None)
    if function is None:
        return [f"{owner.__name__} has no {name}"]
    found = tuple(inspect.signature(function).parameters)[: len(wanted)]
    return [] if found == wanted else [f"{owner.__name__}.{name} takes {found}, not {wanted}"]


def _attributes(owner: Any, name: str, *wanted: str) -> list[str]:
    """What a method does not use of its object, by name: instances have what no class tells of."""
    function = getattr(owner, name, None)
    if function is None:
        return [f"{owner.__name__} has no {name}"]
    missing = sorted(set(wanted) - set(function.__code__.co_names))
    return [f"{owner.__name__}.{name} uses no {', '.join(missing)}"] if missing else []
