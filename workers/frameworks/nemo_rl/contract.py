"""What these adapters rely on in the installed NeMo-RL, held against its signatures before anything runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter
from typing import Any

# The commit of github.com/NVIDIA-NeMo/RL, branch main of 22 August 2026, at which the signatures below were read.
READ_AT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
# What ray.remote adds to the methods of a class, in place.
_OF_RAY = "_ray_trace_ctx"
_MARKS: dict[object, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Published:
    """A class of NeMo-RL, as it was read.

    Attributes:
        module: where it is.
        name: of the class.
        methods: name → parameters as :func:`shown` shows them.
        answered: what an abstract class may ask for beside ``methods``, since the adapter has it; None if the adapter
            does not stand in for the class.
    """

    module: str
    name: str
    methods: Mapping[str, str]
    answered: frozenset[str] | None = field(default=None)


CHECKPOINT_ENGINE = Published(
    "nemo_rl.utils.checkpoint_engines.base",
    "CheckpointEngine",
    {
        "prepare": "self",
        "init_policy_process_group": "self, *, worker_rank, train_world_size, rollout_world_size, metadata",
        "init_rollout_process_group": "self, *, rollout_rank, train_world_size, rollout_world_size, metadata",
        "send_weights": "self, weights",
        "receive_weight_batches": "self",
        "finalize": "self",
        "get_target_weight_layout": "self",
    },
    answered=frozenset(),
)
SYNCHRONIZER = Published(
    "nemo_rl.weight_sync.interfaces",
    "WeightSynchronizer",
    {
        "sync_weights": "self, *, timer, kv_scales",
        "init_communicator": "self",
        "shutdown": "self",
    },
    answered=frozenset({"is_stale", "mark_stale"}),
)
WORKER_GROUP = Published(
    "nemo_rl.distributed.worker_groups",
    "RayWorkerGroup",
    {
        "run_all_workers_single_data": "self, method_name, *args, run_rank_0_only_axes, **kwargs",
        "run_all_workers_multiple_data": "self, method_name, *args, run_rank_0_only_axes, common_kwargs, **kwargs",
    },
)
GENERATION = Published(
    "nemo_rl.models.generation.vllm.vllm_generation",
    "VllmGeneration",
    {"prepare_for_generation": "self, *args, **kwargs"},
)
GENERATION_RPC = Published(
    "nemo_rl.models.generation.vllm.checkpoint_engine",
    "VllmCheckpointEngineRpcMixin",
    {"checkpoint_engine_rpc": "self, checkpoint_method, method_args"},
)
ASYNC_GENERATION_RPC = Published(
    "nemo_rl.models.generation.vllm.checkpoint_engine",
    "VllmAsyncCheckpointEngineRpcMixin",
    {"checkpoint_engine_rpc_async": "self, checkpoint_method, method_args"},
)
POLICY = Published(
    "nemo_rl.models.policy.lm_policy",
    "Policy",
    {"offload_before_refit": "self", "offload_after_refit": "self"},
)

# What the driver process of NeMo-RL has loaded by the time that a synchronizer is put in place.
SHARD_TO_SHARD = (SYNCHRONIZER, WORKER_GROUP, GENERATION, GENERATION_RPC, ASYNC_GENERATION_RPC, POLICY)


class UnsupportedNemoRl(ImportError):
    """The installed NeMo-RL calls in another way than this adapter answers, or answers in another way."""


def shown(method: Any) -> str:
    """Names of a method's parameters, with what marks those that go by keyword alone."""
    parts: list[str] = []
    keywords = False
    for name, parameter in inspect.signature(inspect.unwrap(method)).parameters.items():
        if name == _OF_RAY:
            continue
        if parameter.kind is Parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
        keywords |= parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL)
        parts.append(_MARKS.get(parameter.kind, "") + name)
    return ", ".join(parts)


def differences(published: Published, found: Any) -> list[str]:
    """All in which ``found`` differs from what was read, one sentence each."""
    wrong = []
    for method, wanted in published.methods.items():
        given = getattr(found, method, None)
        if given is None:
            wrong.append(f"{published.name} has no {method}")
        elif shown(given) != wanted:
            wrong.append(f"{published.name}.{method} takes ({shown(given)}), not ({wanted})")
    if published.answered is not None:
        # A method that a later NeMo-RL asks for would be missed at its first call, in the middle of a run.
        asked: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        known = published.answered | set(published.methods)
        wrong += [f"{published.name} asks for {method}" for method in sorted(asked - known)]
    return wrong


def violations(contract: Sequence[Published]) -> list[str]:
    """All in which the installed NeMo-RL differs from ``contract``; what can't be imported counts."""
    wrong = []
    for published in contract:
        try:
            found = getattr(importlib.import_module(published.module), published.name, None)
        except ImportError as error:
            wrong.append(f"{published.module} can't be imported ({error})")
            continue
        wrong += (
            [f"{published.module} has no {published.name}"]
            if found is None
            else differences(published, found)
        )
    return wrong


def require_supported(contract: Sequence[Published]) -> None:
    """Check the installed NeMo-RL.

    Raises:
        UnsupportedNemoRl: names the version and all differences.
    """
    wrong = violations(contract)
    if wrong:
        try:
            installed = version("nemo-rl")
        except PackageNotFoundError:
            installed = "(a checkout without metadata)"
        raise UnsupportedNemoRl(
            f"NeMo-RL {installed} is not supported by rlrefit's adapter, which is written for commit {READ_AT[:9]} of "
            f"NVIDIA-NeMo/RL: {'; '.join(wrong)}. Nothing was changed; check out that commit, or refit by one of NeMo-RL's "
            "own transports (policy.generation.refit_transport)"
        )
