"""What the adapter relies on in the installed verl, held against its signatures before anything runs.

The checkpoint engines rely on verl's interface for them. Shard to shard also relies on an actor's engine, on verl's
extension of vLLM's workers and on its server of SGLang.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "0.9.1"
# What is told of a bucket that has no size.
NO_BUCKET = "checkpoint_engine.update_weights_bucket_megabytes leaves no room for a weight; give at least 1"

# Parameters that verl's callers pass by name or place, by class and method.
_ENGINE = {
    "prepare": ["self"],
    "build_topology": ["actor_wg_world_size", "rollout_world_size", "metadata"],
    "init_process_group": ["self", "kwargs"],
    "finalize": ["self"],
    "send_weights": ["self", "weights", "global_steps"],
    "receive_weights": ["self", "global_steps"],
}
_MANAGER = {
    "__init__": ["self", "config", "actor_wg", "replicas"],
    "build_process_group": ["self", "rollout"],
    "update_weights": ["self", "global_steps"],
    "add_replicas": ["self", "replicas"],
    "remove_replicas": ["self", "replicas"],
}
_REGISTRY = {"register": ["backend"], "get": ["backend"], "new": ["backend", "args", "kwargs"]}
_EXTENSION = {
    "update_weights_from_ipc": ["self", "peft_config", "base_sync_done", "use_shm"],
    "_get_zmq_handle": ["self"],
}
_RECEIVER = {
    "__init__": ["self", "zmq_handle", "device", "use_shm"],
    "receive_weights": ["self", "on_bucket_received"],
}
_SERVER = {
    "get_server_address": ["self"],
    "abort_all_requests": ["self"],
    "resume_generation": ["self"],
    "release_kv_cache": ["self"],
    "resume_kv_cache": ["self"],
}
_ADAPTER = {
    "_init_server_adapter": ["self"],
    "update_weights": ["self", "weights", "global_steps", "wire_format", "kwargs"],
}
# By method, attributes that it gives the server, or the rollout worker's adapter to it.
_SERVER_ATTRIBUTES = {"launch_server": ["tokenizer_manager"]}
_ADAPTER_ATTRIBUTES = {"_init_server_adapter": ["_engine", "server_actor"], "__init__": ["replica_rank"]}
_TRAINER = {
    "__init__": ["self", "config"],
    "_setup": ["self"],
    "on_step_end": ["self"],
    "_consume_sync_metrics": ["self"],
}
# Added by Ray to the methods of a class of which it makes an actor.
_RAYS_OWN = "_ray_trace_ctx"
# Of verl's ActorRolloutRefWorker with its model loaded.
_ACTOR = (
    "actor.engine.module",
    "actor.engine.is_param_offload_enabled",
    "config.actor.strategy",
    "config.rollout.name",
    "config.rollout.dtype",
    "config.model",
)
# Of one with verl's Megatron engine, besides.
_MEGATRON_ACTOR = (
    "actor.engine.bridge",
    "actor.engine.vanilla_bridge",
    "actor.engine.engine_config.use_megatron_fsdp",
)


class UnsupportedVerl(ImportError):
    """The installed verl calls checkpoint engines in another way than this adapter answers."""


def violations(base: Any) -> list[str]:
    """All in which ``verl.checkpoint_engine.base`` differs from what the adapter was written for."""
    found = []
    for name, methods in (
        ("CheckpointEngine", _ENGINE),
        ("CheckpointEngineManager", _MANAGER),
        ("CheckpointEngineRegistry", _REGISTRY),
    ):
        kind = getattr(base, name, None)
        if kind is None:
            found.append(f"there is no {name}")
            continue
        found += _differences(kind, name, methods)
        # A method that a later verl asks for would be missed at its first call, in the middle of a run.
        asked: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
        found += [f"{name} asks for {method}" for method in sorted(asked - set(methods))]
    return found


def require_supported(base: Any) -> None:
    """Check the installed verl.

    Raises:
        UnsupportedVerl: names the version and all differences.
    """
    wrong = violations(base)
    if wrong:
        raise UnsupportedVerl(
            f"verl {installed_version()} is not supported by rlrefit's adapter, which is written for {TESTED}: {'; '.join(wrong)}. "
            f"Nothing was registered; install verl=={TESTED}, or set checkpoint_engine.backend to one of verl's own"
        )


def installed_version() -> str:
    """Of verl, as far as its metadata tell."""
    try:
        return version("verl")
    except PackageNotFoundError:
        return "(a checkout without metadata)"


def require_supported_actor(worker: Any) -> None:
    """Check what shard to shard reads of an actor.

    Raises:
        UnsupportedVerl: names the version and all that is missing.
    """
    absent = [path for path in _ACTOR if not _has(worker, path)]
    if not absent and worker.config.actor.strategy == "megatron":
        absent = [path for path in _MEGATRON_ACTOR if not _has(worker, path)]
    _require(
        [f"its actor has no {', no '.join(absent)}"] if absent else [],
        "shard to shard, which is",
        "Nothing was sent",
        "use rlrefit.workers.frameworks.verl.full_tensors, which needs the export alone",
    )


def require_known_model(worker: Any) -> None:
    """Check that an actor says what its model is, which full tensors alone need to know of it.

    Raises:
        UnsupportedVerl: names the version.
    """
    _require(
        [] if _has(worker, "config.model") else ["its actor has no config.model"],
        "full tensors, which are",
        "Nothing was sent",
        "set checkpoint_engine.backend to one of verl's own",
    )


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def rollout_violations(extension: Any, transfer: Any) -> list[str]:
    """All in which verl's extension of vLLM's workers, and how it is handed weights, differ from what was expected."""
    found = []
    receiver = getattr(transfer, "BucketedWeightReceiver", None)
    for kind, name, methods in (
        (extension, "vLLMColocateWorkerExtension", _EXTENSION),
        (receiver, "BucketedWeightReceiver", _RECEIVER),
    ):
        found += _differences(kind, name, methods)
    return found


def require_supported_rollout(extension: Any, transfer: Any) -> None:
    """Check the installed verl's rollout for vLLM.

    Raises:
        UnsupportedVerl: names the version and all differences.
    """
    _require(
        rollout_violations(extension, transfer),
        "extension of vLLM's workers, which is",
        "Nothing was started",
        "use rlrefit.workers.frameworks.verl.full_tensors, which needs no extension",
    )


def server_violations(server: Any, adapter: Any) -> list[str]:
    """All in which verl's server of SGLang, and the rollout workers' adapter to it, differ from what was expected."""
    found = []
    for kind, name, methods, attributes in (
        (server, "SGLangHttpServer", _SERVER, _SERVER_ATTRIBUTES),
        (adapter, "ServerAdapter", _ADAPTER, _ADAPTER_ATTRIBUTES),
    ):
        found += _differences(kind, name, methods)
        for method, wanted in attributes.items():
            call = getattr(kind, method, None)
            code = getattr(call, "__code__", None)
            absent = sorted(set(wanted).difference(() if code is None else code.co_names))
            found += [f"{name}.{method} sets no {', '.join(absent)}"] if absent else []
    return found


def require_supported_server(server: Any, adapter: Any) -> None:
    """Check the installed verl's rollout for SGLang.

    Raises:
        UnsupportedVerl: names the version and all differences.
    """
    _require(
        server_violations(server, adapter),
        "way to SGLang's workers, which is",
        "Nothing was written",
        "use vLLM, or rlrefit.workers.frameworks.verl.full_tensors, which hands full tensors to verl's own loading",
    )


def require_supported_trainer(trainer: Any) -> None:
    """Check ``verl.trainer.ppo.v1.PPOTrainer``.

    Raises:
        UnsupportedVerl: names the version and all differences.
    """
    _require(
        _differences(trainer, "PPOTrainer", _TRAINER),
        "trainers, which are",
        "None was registered",
        "take rlrefit.workers.frameworks.verl.trainers out of VERL_USE_EXTERNAL_MODULES, and one of verl's own as "
        "trainer.v1.trainer_mode",
    )


def _require(wrong: list[str], part: str, outcome: str, remedy: str) -> None:
    """Refuse the installed verl if anything is wrong: what of rlrefit can't serve it, what came of it, and what else there is."""
    if wrong:
        raise UnsupportedVerl(
            f"verl {installed_version()} is not supported by rlrefit's {part} written for {TESTED}: {'; '.join(wrong)}. "
            f"{outcome}; install verl=={TESTED}, or {remedy}"
        )


def _differences(kind: Any, name: str, methods: Mapping[str, list[str]]) -> list[str]:
    """A sentence for each method of a class that is missing or takes other parameters."""
    found = []
    for method, wanted in methods.items():
        call: Callable[..., Any] | None = getattr(kind, method, None)
        if call is None:
            found.append(f"{name} has no {method}")
            continue
        # auto_await and others wrap; the class's own first argument is bound away from class methods.
        given = [name for name in inspect.signature(inspect.unwrap(call)).parameters if name != _RAYS_OWN]
        if given != wanted:
            found.append(f"{name}.{method} takes ({', '.join(given)}), not ({', '.join(wanted)})")
    return found
