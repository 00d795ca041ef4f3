"""What shard to shard relies on in the installed verl beyond its checkpoint engines, held against its signatures."""

from __future__ import annotations

import inspect
from typing import Any

from .full_tensors_contract import TESTED, UnsupportedVerl, installed_version

_EXTENSION = {
    "update_weights_from_ipc": ["self", "peft_config", "base_sync_done", "use_shm"],
    "_get_zmq_handle": ["self"],
}
_RECEIVER = {
    "__init__": ["self", "zmq_handle", "device", "use_shm"],
    "receive_weights": ["self", "on_bucket_received"],
}
# Of verl's ActorRolloutRefWorker with its model loaded.
_ACTOR = (
    "actor.engine.module",
    "actor.engine.is_param_offload_enabled",
    "config.actor.strategy",
    "config.rollout.name",
    "config.rollout.dtype",
    "config.model",
)


def require_supported_actor(worker: Any) -> None:
    """Check what shard to shard reads of an actor.

    Raises:
        UnsupportedVerl: names the version and all that is missing.
    """
    absent = [path for path in _ACTOR if not _has(worker, path)]
    if absent:
        raise UnsupportedVerl(
            f"verl {installed_version()} is not supported by rlrefit's shard to shard, which is written for {TESTED}: its "
            f"actor has no {', no '.join(absent)}. Nothing was sent; install verl=={TESTED}, or use "
            "rlrefit.workers.frameworks.verl.full_tensors, which needs the export alone"
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
        for method, wanted in methods.items():
            call = getattr(kind, method, None)
            given = None if call is None else list(inspect.signature(inspect.unwrap(call)).parameters)
            if given is None:
                found.append(f"{name} has no {method}")
            elif given != wanted:
                found.append(f"{name}.{method} takes ({', '.join(given)}), not ({', '.join(wanted)})")
    return found


def require_supported_rollout(extension: Any, transfer: Any) -> None:
    """Check the installed verl's rollout for vLLM.

    Raises:
        UnsupportedVerl: names the version and all differences.
    """
    wrong = rollout_violations(extension, transfer)
    if wrong:
        raise UnsupportedVerl(
            f"verl {installed_version()} is not supported by rlrefit's extension of vLLM's workers, which is written for "
            f"{TESTED}: {'; '.join(wrong)}. Nothing was started; install verl=={TESTED}, or use "
            "rlrefit.workers.frameworks.verl.full_tensors, which needs no extension"
        )
