"""What differs between the versions of TensorRT-LLM, found by looking and not by version numbers.

Its modules have moved, and its restricted unpickler has had two generations: one that imports only what is approved
(``loads(data, approved_imports=…)``), and one that can refuse imports as well (``disallowed_imports=…``), to which
TensorRT-LLM's own extension at times gives nothing but a list of refusals. What rlrefit reads is approved explicitly, by
the argument that both have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import RefitError
from ...checkpoint_folder import weight_names
from .payload import Imports

_SERIALIZATION = ("tensorrt_llm.llmapi.serialization", "tensorrt_llm.serialization")
_CONTROL = ("tensorrt_llm.executor.ray.utils", "tensorrt_llm._ray_utils")
# What TensorRT-LLM's own extension refuses, and what would undo the approvals.
_DISALLOWED = {"torch.storage": ["_load_from_bytes"], "torch.hub": ["_load_local"], "torch": ["save", "load"]}
# How a caller tells of the weights instead.
ANNOUNCE = (
    "announce them: refit_begin(version, [[name, shape, dtype], …]) on all workers before the buckets, and "
    "refit_commit(version) after update_weights(None), as TrtllmDriver does"
)
# Set on a model between the first bucket and the end of a refit, by TensorRT-LLM's extension.
_LATCH = "first_pre_reload_weights"


def restricted_loads(data: bytes, approved: Imports) -> Any:
    """Unpickle with the engine's own restricted unpickler, of either generation.

    Raises:
        RefitError: the payload imports something else, or is no pickle; or this TensorRT-LLM's unpickler takes no
            approvals.
    """
    loads = _module(_SERIALIZATION).loads
    known = inspect.signature(loads).parameters
    if "approved_imports" not in known:
        raise RefitError(
            "the unpickler of this TensorRT-LLM (serialization.loads) takes no approved_imports, so that a payload could "
            "import anything that it does not happen to refuse. Nothing was read; use a version that has them",
            stage="transfer",
        )
    # Lists and a dict of its own: a version that widens what it is given must not widen ours.
    limits: dict[str, Any] = {"approved_imports": {module: list(names) for module, names in approved.items()}}
    if "disallowed_imports" in known:
        limits["disallowed_imports"] = {module: list(names) for module, names in _DISALLOWED.items()}
    try:
        return loads(data, **limits)
    # Of any kind: a hostile or damaged pickle makes the unpickler raise whatever it likes.
    except Exception as error:
        raise RefitError(
            f"TensorRT-LLM's restricted unpickler refused a payload of weights: {type(error).__name__}: {error}. Nothing "
            "of it was loaded. A payload of rlrefit imports nothing but what its allow-list has, so this one is damaged or "
            "not rlrefit's",
            stage="transfer",
        ) from error


def control_action(method: Callable[..., Any]) -> Callable[..., Any]:
    """TensorRT-LLM's own decorator: ``method`` runs once the running requests have ended, with the engine's loop held."""
    decorated: Callable[..., Any] = _module(_CONTROL).control_action_decorator(method)
    return decorated


def uncontrolled(method: Callable[..., Any]) -> Callable[..., Any]:
    """What ``control_action`` was put around: to be called by who holds the engine's loop already.

    Raises:
        RefitError: it can't be told apart; calling it would wait for the loop that its caller holds.
    """
    bare = inspect.unwrap(method)
    if bare is method:
        raise RefitError(
            "WorkerExtension.update_weights of this TensorRT-LLM is not decorated as any known version's is (by "
            "control_action_decorator), so a refit could hang in it. Nothing has moved; use a known version (docs/trtllm.md)",
            stage="settings",
        )
    return bare


def abort_cycle(worker: Any) -> None:
    """Let the engine forget a reload that has not come to its end, in the way that this version has."""
    model_engine = worker.engine.model_engine
    for owner in (worker, model_engine.model_loader):
        if hasattr(owner, "abort_update_weights"):
            owner.abort_update_weights()
            break
    # Older versions leave it, and would merge the next refit's buckets into the failed one.
    if hasattr(model_engine.model, _LATCH):
        delattr(model_engine.model, _LATCH)


def checkpoint_names(worker: Any, undefined: str) -> frozenset[str]:
    """Names of the weights in the checkpoint that the engine was made for: what a full load of its model takes.

    Args:
        worker: TensorRT-LLM's worker, which keeps the checkpoint's folder (``BaseWorker``).
        undefined: why they are asked for.

    Raises:
        RefitError: it has no such folder, or the folder no readable safetensors.
    """
    folder = getattr(worker, "_hf_model_dir", None)
    problem = "TensorRT-LLM's worker names no folder of a checkpoint"
    if folder is not None:
        try:
            found = weight_names(Path(folder))
        except ValueError as error:
            problem = str(error)
        else:
            return found
    raise RefitError(
        f"{undefined}, and the names of its weights are not known, without which a refit that leaves some out can't be "
        f"told from a whole one: {problem}. Nothing was written. Start the engine from a checkpoint's folder, or {ANNOUNCE}",
        stage="handshake",
    )


def baked_in(worker: Any) -> Hashable:
    """What captured CUDA graphs of the model may hold: addresses of its tensors, and numbers that kernels were given.

    Loading recreates parameters of quantized layers (``pre_reload_weights``), assigns derived ones, and keeps some as
    Python numbers (``scalar_alpha`` of NVFP4).
    """
    found: list[Hashable] = []
    for module in worker.engine.model_engine.model.modules():
        for holder in (vars(module), module._parameters, module._buffers):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    found.append((name, value.data_ptr()))
                elif isinstance(value, float):
                    found.append((name, value))
    return tuple(found)


def release_graphs(worker: Any) -> None:
    """Drop captured CUDA graphs: they would go on computing with what they hold.

    Raises:
        RefitError: this version can't.
    """
    model_engine = worker.engine.model_engine
    if hasattr(model_engine, "_release_cuda_graphs"):
        model_engine._release_cuda_graphs()
    elif getattr(worker.llm_args, "cuda_graph_config", None) is not None:
        raise RefitError(
            "loading moved tensors of the model, which captured CUDA graphs would go on reading where they were, and this "
            "TensorRT-LLM has no way to drop its graphs. The engine refuses to generate; start it without "
            "cuda_graph_config, or use a known version (docs/trtllm.md)",
            stage="post_load",
        )


def loads_in_parts(worker: Any) -> bool:
    """Whether the worker's model takes its weights in several buckets; some vision-language models take all at once."""
    return (
        "allow_partial_loading" in inspect.signature(worker.engine.model_engine.model.load_weights).parameters
    )


def device_uuid(device_id: int) -> str:
    """The GPU's UUID as TensorRT-LLM writes it, ``GPU-…``: the key under which the worker finds its payload."""
    found: str = import_module("tensorrt_llm._torch.utils").get_device_uuid(device_id)
    return found


def memory_tags() -> tuple[str, ...]:
    """All that can sleep but the KV cache, by TensorRT-LLM's names: what ``weights`` stands for."""
    kinds = import_module("tensorrt_llm._torch.virtual_memory").ExecutorMemoryType
    return tuple(
        str(kind.value) for kind in kinds if kind.value != KV_CACHE and not kind.value.startswith("_")
    )


def _module(candidates: tuple[str, ...]) -> ModuleType:
    for name in candidates:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise RefitError(
        f"this TensorRT-LLM has none of {', '.join(candidates)}; use a known version (docs/trtllm.md)",
        stage="settings",
    )
