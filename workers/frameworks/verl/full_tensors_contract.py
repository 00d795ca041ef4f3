"""What this adapter relies on in the installed verl, held against its signatures before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "0.9.1"

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
        for method, wanted in methods.items():
            given = _parameters(getattr(kind, method, None))
            if given is None:
                found.append(f"{name} has no {method}")
            elif given != wanted:
                found.append(f"{name}.{method} takes ({', '.join(given)}), not ({', '.join(wanted)})")
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


def _parameters(method: Callable[..., Any] | None) -> list[str] | None:
    if method is None:
        return None
    # auto_await and others wrap; the class's own first argument is bound away from class methods.
    return list(inspect.signature(inspect.unwrap(method)).parameters)
