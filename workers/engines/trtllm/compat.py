"""What differs between versions of TensorRT-LLM, found by inspection instead of version numbers; its modules have moved, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import RefitError
from ...checkpoint_folder import weight_names

_CONTROL = ("tensorrt_llm.executor.ray.utils", "tensorrt_llm._ray_utils")
_MEMORY = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")
# By which the executor computes with the model; versions without encoders of their own have the first alone.
_STEPS = ("forward", "forward_encoder", "forward_multimodal_encoder_items")
# How a caller announces the weights.
ANNOUNCE = (
    "announce them: refit_begin(version, [[name, shape, dtype], …]) on all workers before the buckets, and "
    "refit_commit(version) after update_weights(None), as TrtllmDriver does"
)
# Set on a model between the first bucket and the end of a refit, by TensorRT-LLM's extension.
_LATCH = "first_pre_reload_weights"


def control_action(method: Callable[..., Any]) -> Callable[..., Any]:
    """TensorRT-LLM's own decorator: ``method`` runs once the running requests have ended, while the engine's loop waits."""
    decorated: Callable[..., Any] = look_up("control_action_decorator", _CONTROL)(method)
    return decorated


def uncontrolled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method inside ``control_action``, for callers for which the engine's loop waits already.

    Raises:
        RefitError: the method is not decorated as expected; calling it would wait for ever for the loop.
    """
    bare = inspect.unwrap(method)
    if bare is method:
        raise RefitError(
            "WorkerExtension.update_weights of this TensorRT-LLM is not decorated as any known version's is (by "
            "control_action_decorator), so a refit could hang in it. Nothing has moved; use a known version (docs/trtllm.md)",
            stage="settings",
        )
    return bare


def require_reloadable(worker: Any) -> None:
    """Ask the model and its modules whether they can be loaded again, where this version has the question.

    TensorRT-LLM's own extension asks with the first bucket, when the engine has begun to refuse steps.

    Raises:
        RefitError: one can't (experts that are balanced over ranks, EPLB); or the model keeps what its encoder made of images,
            which TensorRT-LLM does not drop when it finalizes. Nothing has changed.
    """
    model = worker.engine.model_engine.model
    if getattr(model, "encoder_cache_active", False):
        raise RefitError(
            "the engine's multimodal encoder cache would go on serving what it made with the old weights, as no refit of "
            "TensorRT-LLM drops it. Nothing was written; start the engine with multimodal_config.encoder_cache_max_bytes=0",
            stage="handshake",
        )
    for module in model.modules():
        if hasattr(module, "check_reload_capability") and not getattr(module, "_weights_removed", False):
            try:
                module.check_reload_capability()
            # Of any kind, as the module likes.
            except Exception as error:
                raise RefitError(
                    f"a {type(module).__name__} of the engine's model can't be loaded again: {type(error).__name__}: {error}. "
                    "Nothing was written, and the engine serves what it served; start it without that feature",
                    stage="handshake",
                ) from error


def steps(worker: Any) -> list[str]:
    """Names of the model engine's methods that compute with the weights."""
    return [name for name in _STEPS if hasattr(worker.engine.model_engine, name)]


def abort_cycle(worker: Any) -> None:
    """Make the engine give up an unfinished reload, in the way that this version has."""
    model_engine = worker.engine.model_engine
    for owner in (worker, model_engine.model_loader):
        if hasattr(owner, "abort_update_weights"):
            owner.abort_update_weights()
            break
    # Older versions keep it, and would merge the next refit's buckets into the failed one.
    if hasattr(model_engine.model, _LATCH):
        delattr(model_engine.model, _LATCH)


def checkpoint_names(worker: Any, undefined: str) -> frozenset[str]:
    """Names of the weights in the engine's checkpoint: what a full load of its model takes.

    Args:
        worker: TensorRT-LLM's worker, which keeps the checkpoint's folder (``BaseWorker``).
        undefined: why they are needed, for the error.

    Raises:
        RefitError: it has no such folder, or the folder no readable safetensors.
    """
    folder = getattr(worker, "_hf_model_dir", None)
    problem = "TensorRT-LLM's worker has no checkpoint folder"
    if folder is not None:
        try:
            found = weight_names(Path(folder))
        except ValueError as error:
            problem = str(error)
        else:
            return found
    raise RefitError(
        f"{undefined}, and the names of its weights are not known, so an incomplete refit can't be told from a complete one: "
        f"{problem}. Nothing was written. Start the engine from a checkpoint's folder, or {ANNOUNCE}",
        stage="handshake",
    )


def baked_in(worker: Any) -> Hashable:
    """What captured CUDA graphs of the model may hold: addresses of its tensors, and numbers passed to kernels.

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
    """Drop captured CUDA graphs, which would compute with old addresses and numbers.

    Raises:
        RefitError: this version can't.
    """
    model_engine = worker.engine.model_engine
    if hasattr(model_engine, "_release_cuda_graphs"):
        model_engine._release_cuda_graphs()
    elif getattr(worker.llm_args, "cuda_graph_config", None) is not None:
        raise RefitError(
            "loading moved tensors of the model, captured CUDA graphs would still read the old addresses, and this TensorRT-LLM "
            "has no way to drop its graphs. The engine refuses to generate; start it without cuda_graph_config, or use a known "
            "version (docs/trtllm.md)",
            stage="post_load",
        )


def loads_in_parts(worker: Any) -> bool:
    """Whether the worker's model takes its weights in several buckets.

    Some vision-language models take all at once. And a bucket reaches every joined layer, without weights if it has none of the
    layer's: methods for quantized layers that do not know partial loading (NVFP4's in several versions) fail then.
    """
    modules = worker.engine.model_engine.model.modules()
    kinds = {
        type(method) for module in modules if (method := getattr(module, "quant_method", None)) is not None
    }
    return knows_parts(worker) and all(
        _partial(getattr(kind, name))
        for kind in kinds
        for name in dir(kind)
        if name.startswith("load_weights")
    )


def knows_parts(worker: Any) -> bool:
    """Whether the model's own ``load_weights`` can be told that other weights come in other calls."""
    return _partial(worker.engine.model_engine.model.load_weights)


def _partial(load: Callable[..., Any]) -> bool:
    return "allow_partial_loading" in inspect.signature(load).parameters


def device_uuid(device_id: int) -> str:
    """The GPU's UUID as TensorRT-LLM writes it, ``GPU-…``: the key under which the worker finds its payload."""
    found: str = import_module("tensorrt_llm._torch.utils").get_device_uuid(device_id)
    return found


def memory_tags() -> tuple[str, ...]:
    """TensorRT-LLM's tags of everything that can sleep except the KV cache: what ``weights`` stands for."""
    kinds = look_up("ExecutorMemoryType", _MEMORY)
    return tuple(
        str(kind.value) for kind in kinds if kind.value != KV_CACHE and not kind.value.startswith("_")
    )


def look_up(name: str, paths: tuple[str, ...]) -> Any:
    """``name`` from the first of these modules that has it in this TensorRT-LLM.

    Raises:
        RefitError: none of them has it.
    """
    for path in paths:
        try:
            module = import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise RefitError(
        f"this TensorRT-LLM has {name} in none of {', '.join(paths)}; use a known version (docs/trtllm.md)",
        stage="settings",
    )
