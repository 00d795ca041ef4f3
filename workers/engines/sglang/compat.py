"""Does the SGLang that is there have what rlrefit uses, and which settings can't be refitted?

SGLang's internals move between releases. What is missing is told by name before anything is written: of the process that takes
requests as a driver is made (:func:`require_calls`), of the workers by rlrefit's loader (:func:`differences`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ....integration.errors import RefitError
from .drafters import drafter_problems

logger = logging.getLogger(__name__)

# The releases that the tests have run. Any other is taken if it has what is asked for, with a warning.
TESTED = ("0.5.17", "0.5.23")
# What SGLang makes of FP8 blocks after loading can't be asked by name. It was read in these releases alone.
FP8_READ = ("0.5.17", "0.5.23")
# Nor what its attention does with the scales of an FP8 KV cache, which was read in these.
SCALES_READ = ("0.5.17", "0.5.23")
# What a driver in the engine's process uses of SGLang's tokenizer manager beside its requests.
_MANAGER = (
    "auto_create_handle_loop",
    "config_value",
    "flush_cache",
    "get_internal_state",
    "is_pause",
    "record_config_updates",
)
# Prefix stores that SGLang's flush does not empty. Host memory alone (enable_hierarchical_cache) is flushed with the prefixes
# on the device. A radix cache of another name may be any code: FlexKV, or what a package has registered.
STORES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "radix_cache_backend")
KEEPS_PREFIXES = (
    "keeps keys and values of earlier prompts where SGLang's flush after a refit leaves them, so that a later prompt would load "
    "what the old weights made"
)


def warn_of_untested(version: str) -> None:
    """Log that a release is none that the tests have run."""
    if release(version) not in TESTED:
        logger.warning(
            "rlrefit's tests have run SGLang %s, and this is %s. It has the names that refits rely on; what they do was not "
            "tested. Compare its generations with the trainer's log-probabilities before relying on it",
            " and ".join(TESTED),
            version,
        )


def release(version: str) -> str:
    """The version without the suffix of a local build."""
    return version.partition("+")[0]


def require_calls(version: str, manager: Any, io_struct: Any, requests: Mapping[str, str]) -> None:
    """Check what a driver is about to use of SGLang in the engine's process.

    Args:
        version: of SGLang.
        manager: its tokenizer manager.
        io_struct: its module of requests.
        requests: by the manager's method, the name of the request that it takes.

    Raises:
        RefitError: lists everything that is missing.
    """
    absent = [name for name in (*_MANAGER, *requests) if not hasattr(manager, name)]
    absent += [name for name in requests.values() if not hasattr(io_struct, name)]
    if absent:
        raise RefitError(_text(version, [f"it has no {name}" for name in absent]), stage="settings")


def stores_of(settings: Mapping[str, Any]) -> list[str]:
    """The prefix stores of an engine with ``settings``, each with its consequence."""
    return [f"{name} is {settings[name]!r}, which {KEEPS_PREFIXES}" for name in STORES if settings[name]]


def unsupported_settings(settings: Mapping[str, Any], loader: str) -> list[str]:
    """Why an engine with ``settings`` can't be refitted; empty if it can.

    Args:
        settings: as :data:`~.callers.SETTINGS`.
        loader: that ``custom_weight_loader`` has to name.
    """
    problems = []
    if loader not in (settings["custom_weight_loader"] or []):
        problems.append(f"custom_weight_loader lacks {loader!r}")
    for name in ("pp_size", "dp_size"):
        if settings[name] != 1:
            problems.append(f"{name} is {settings[name]}, and only one tensor-parallel group can be refitted")
    if settings["enable_eplb"]:
        problems.append("enable_eplb moves experts between ranks, and a refit would overwrite other experts")
    if settings["weight_cache_mode"] != "off":
        problems.append(f"weight_cache_mode is {settings['weight_cache_mode']!r}: its weights are shared")
    if settings["disaggregation_mode"] != "null":
        problems.append(
            f"disaggregation_mode is {settings['disaggregation_mode']!r}: its queues are not flushed"
        )
    return [*problems, *drafter_problems(settings), *stores_of(settings)]


def differences() -> str:
    """What the refit relies on and this SGLang lacks, as text, empty if nothing; called in its workers."""
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
        *_attributes(Scheduler, "init_tp_model_worker", "tp_worker"),
        *_attributes(Scheduler, "maybe_init_draft_worker", "draft_worker"),
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
        f"SGLang {version} lacks what rlrefit's refits rely on: {'; '.join(problems)}. Nothing was written; install SGLang "
        f"{' or '.join(TESTED)}, or a newer rlrefit"
    )


def _parameters(owner: Any, name: str, *wanted: str) -> list[str]:
    function = getattr(owner, name, None)
    if function is None:
        return [f"{owner.__name__} has no {name}"]
    found = tuple(inspect.signature(function).parameters)[: len(wanted)]
    return [] if found == wanted else [f"{owner.__name__}.{name} takes {found}, not {wanted}"]


def _attributes(owner: Any, name: str, *wanted: str) -> list[str]:
    """Attributes that a method does not use, by name; a class does not show which attributes its instances have."""
    function = getattr(owner, name, None)
    if function is None:
        return [f"{owner.__name__} has no {name}"]
    missing = sorted(set(wanted) - set(function.__code__.co_names))
    return [f"{owner.__name__}.{name} uses no {', '.join(missing)}"] if missing else []
