"""What the adapter relies on in the installed TRL, held against it before anything runs."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "1.16.0"

# Parameters that are passed by name or place, by class and method; of `__init__` those among others.
_METHODS = {
    "AsyncGRPOTrainer": {"_sync_weight_merged": ["self", "t0"]},
    "RolloutWorkerProtocol": {"update_model_version": ["self", "model_version"]},
    "VLLMClient": {"wait_for_server_ready": ["self", "poll_interval_s"]},
}
# What methods of TRL's have to name: what the adapter reads or sets, and whom it stands in for.
_NAMED = {
    "AsyncGRPOTrainer.__init__": [
        "weight_transfer",
        "rollout_worker",
        "vllm_client",
        "model_version",
        "_lora_sync",
    ],
    "AsyncGRPOTrainer._sync_weight": ["_lora_sync", "_sync_weight_merged"],
    "VLLMClient.__init__": ["server_url"],
}
# What the main process may ask of its weight transfer: the first and the last do nothing here, and the others have no caller
# once `_sync_weight_merged` is replaced.
_TRANSFER = {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}


class UnsupportedTrl(ImportError):
    """The installed TRL syncs weights in another way than this adapter replaces."""


def violations(published: Any) -> list[str]:
    """All in which ``trl.experimental.async_grpo.async_grpo_trainer`` differs from what the adapter was written for."""
    found = []
    for name, methods in _METHODS.items():
        for method, wanted in methods.items():
            call = getattr(getattr(published, name, None), method, None)
            if call is None:
                found.append(f"there is no {name}.{method}")
            elif (given := list(inspect.signature(call).parameters)) != wanted:
                found.append(f"{name}.{method} takes ({', '.join(given)}), not ({', '.join(wanted)})")
    for path, names in _NAMED.items():
        kind, method = path.split(".")
        code = getattr(getattr(getattr(published, kind, None), method, None), "__code__", None)
        known = () if code is None else (*code.co_names, *code.co_varnames)
        absent = [name for name in names if name not in known]
        found += [f"{path} knows no {', '.join(absent)}"] if absent else []
    asked = {name for name in vars(getattr(published, "WeightTransferProtocol", object)) if name[0] != "_"}
    found += [f"WeightTransferProtocol asks for {name}" for name in sorted(asked - _TRANSFER)]
    return found


def require_supported(published: Any) -> None:
    """Check the installed TRL.

    Raises:
        UnsupportedTrl: names the version and all differences.
    """
    wrong = violations(published)
    if wrong:
        try:
            installed = version("trl")
        except PackageNotFoundError:
            installed = "(a checkout without metadata)"
        raise UnsupportedTrl(
            f"TRL {installed} is not supported by rlrefit's trainer, which is written for {TESTED}: {'; '.join(wrong)}. Nothing "
            f"was started; install trl=={TESTED}, or train by TRL's own AsyncGRPOTrainer"
        )
