"""The parts of the package ``tensorrt_llm`` that rlrefit's worker extension touches, re-created from its contract.

Stands for, line by line:

- ``llmapi.rlhf_utils.WorkerExtension.update_weights(ipc_handles)``: on the first call of a refit every module's
  ``pre_reload_weights`` runs and the model gets the attribute ``first_pre_reload_weights``; ``ipc_handles[device UUID]``
  is base64 text of a pickle, or the list itself; each entry is ``(name, (func, args))``, of which ``args[6]`` becomes the
  worker's device; the tensors go to ``model_loader.reload(model, weights, allow_partial_loading=True)``. ``None``
  finalizes: ``process_weights_after_loading`` and ``post_load_weights`` of every module, then the prefix cache is reset.
  Later versions call the loader's ``begin_``, ``finalize_`` and ``abort_update_weights`` around that, and drop the
  attribute after a failure.
- ``control_action_decorator``: the method runs inside ``engine.control_action()``, which can't be nested.
- ``_torch.utils.get_device_uuid``: ``GPU-`` and the device's UUID.
- ``ExecutorMemoryType`` (``_torch.virtual_memory``, ``llmapi.llm_args`` in later versions): names of what can sleep.
- where these lie: later versions have moved them. ``llmapi.llm_args`` is there in all of them.

``against_sources.py`` runs TensorRT-LLM's own files in the place of these.
"""

from __future__ import annotations

import base64
import functools
import importlib
import sys
from collections.abc import Callable
from enum import StrEnum
from types import ModuleType
from typing import Any

from .serialization_double import GENERATIONS

_LATCH = "first_pre_reload_weights"


class ExecutorMemoryType(StrEnum):
    SAMPLER = "sampler"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"
    MODEL_EXTRA = "model_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_ENGINE_DRAFT = "draft_model"


def control_action_decorator(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.control_action(drain=True):
            return method(self, *args, **kwargs)

    return wrapper


def get_device_uuid(device_idx: int) -> str:
    return f"GPU-{device_idx:08d}"


def worker_extension(generation: str) -> type:
    """``WorkerExtension`` as this generation has it."""
    loads, rules = GENERATIONS[generation]
    newest = generation == "both"

    class WorkerExtension:
        @control_action_decorator
        def update_weights(self: Any, ipc_handles: dict[str, Any] | None = None) -> None:
            model = self.engine.model_engine.model
            loader = self.engine.model_engine.model_loader
            try:
                if not hasattr(model, _LATCH):
                    if newest:
                        loader.begin_update_weights()
                    for module in model.modules():
                        if hasattr(module, "pre_reload_weights"):
                            module.pre_reload_weights()
                    setattr(model, _LATCH, True)
                if ipc_handles is not None:
                    uuid = get_device_uuid(self.device_id)
                    if uuid not in ipc_handles:
                        raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
                    payload = ipc_handles[uuid]
                    if isinstance(payload, str):
                        payload = loads(base64.b64decode(payload), **rules)
                        if not isinstance(payload, list):
                            raise ValueError("Deserialized data must be a list")
                    weights = {}
                    for name, tensor_handle in payload:
                        func, args = tensor_handle
                        args = list(args)
                        args[6] = self.device_id
                        weights[name] = func(*args)
                    loader.reload(model, weights, allow_partial_loading=True)
                else:
                    if newest:
                        loader.finalize_update_weights()
                    for module in model.modules():
                        if hasattr(module, "process_weights_after_loading"):
                            module.process_weights_after_loading()
                        if hasattr(module, "post_load_weights"):
                            module.post_load_weights()
                    self.engine.reset_prefix_cache()
                    delattr(model, _LATCH)
            except Exception:
                if newest:
                    loader.abort_update_weights()
                    if hasattr(model, _LATCH):
                        delattr(model, _LATCH)
                raise

    return WorkerExtension


def modules_of(generation: str) -> dict[str, ModuleType]:
    """The package's modules by name, for ``sys.modules``."""
    newest = generation == "both"
    found: dict[str, ModuleType] = {}

    def add(name: str, **attributes: Any) -> None:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(found[name]).update(attributes)

    control = "tensorrt_llm.executor.ray.utils" if newest else "tensorrt_llm._ray_utils"
    add(control, control_action_decorator=control_action_decorator)
    serialization = "tensorrt_llm.llmapi.serialization" if newest else "tensorrt_llm.serialization"
    add(serialization, loads=GENERATIONS[generation][0])
    add("tensorrt_llm.llmapi.rlhf_utils", WorkerExtension=worker_extension(generation))
    add("tensorrt_llm._torch.utils", get_device_uuid=get_device_uuid)
    add("tensorrt_llm._torch.virtual_memory")
    add("tensorrt_llm.llmapi.llm_args")
    add(
        "tensorrt_llm.llmapi.llm_args" if newest else "tensorrt_llm._torch.virtual_memory",
        ExecutorMemoryType=ExecutorMemoryType,
    )
    for module in found.values():
        module.__path__ = []  # so that what is not here is looked for, and not found, as in the package
    return found


# To be imported anew, since they hold what they found in the package.
OURS = ("rlrefit.workers.engines.trtllm.extension", "tests.trtllm.host_memory_extension")


def install(generation: str) -> Any:
    """Make ``import tensorrt_llm`` find the double in this process, which is the engine's; returns our extension."""
    sys.modules.update(modules_of(generation))
    return importlib.import_module(OURS[1]).HostMemoryRefit
