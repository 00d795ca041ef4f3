"""What verl may have vLLM serve that refits shard to shard leave as it is, or have not been tried with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from ...integration.config import RefitConfig
from ...integration.errors import RefitError
from ...integration.rendezvous import Rendezvous
from ...integration.session import RefitSession
from ..vllm.drafters import STAYS, has_weights
from .orders import Order


def asked_violations(rollout: Mapping[str, Any]) -> list[str]:
    """By ``actor_rollout_ref.rollout``, on the actors; what a checkpoint's own configuration adds, vLLM's worker knows."""
    found = []
    vllm = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    for key, name in (
        ("rollout.quantization", rollout.get("quantization")),
        ("rollout.engine_kwargs.vllm.quantization", vllm.get("quantization")),
    ):
        if name is not None:
            found.append(
                f"{key} is {name}, for which verl patches vLLM's layers; refits into these have not been tried"
            )
    mtp = rollout.get("mtp") or {}
    if mtp.get("enable") and mtp.get("enable_rollout"):
        found.append(f"rollout.mtp.enable_rollout is true; {STAYS}; set model.mtp.enable_rollout=false")
    speculative = vllm.get("speculative_config")
    # vLLM takes JSON as a text too, which is not read here: it counts as a drafter.
    asked = speculative if isinstance(speculative, Mapping) else {}
    if speculative and has_weights(asked.get("method") or asked.get("model")):
        found.append(f"rollout.engine_kwargs.vllm.speculative_config names a drafter; {STAYS}; leave it out")
    return found


def served_violations(vllm_config: Any) -> list[str]:
    """By what vLLM's worker made of all its settings and of its checkpoint."""
    found = []
    if vllm_config.quant_config is not None:
        found.append(
            f"its weights are quantized ({vllm_config.quant_config.get_name()}, by rollout.quantization, engine_kwargs.vllm "
            "or the checkpoint's own quantization_config), for which verl patches vLLM's layers; refits into these have "
            "not been tried"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and has_weights(speculative.method):
        found.append(
            f"it decodes speculatively ({speculative.method}); {STAYS}; set model.mtp.enable_rollout=false, and no "
            "engine_kwargs.vllm.speculative_config"
        )
    return found


def refuse(order: Order, wrong: list[str]) -> Never:
    """Join the epoch of an order only to tell all other ranks why this one can't take part.

    Raises:
        RefitError: with all reasons.
    """

    def no_destination() -> Never:
        raise RefitError(
            "this engine of verl's can't be refitted shard to shard:\n  "
            + "\n  ".join(wrong)
            + "\nNothing was sent. checkpoint_engine.backend=nccl_xfer with "
            "custom_backend_module=rlrefit.integration.adapters.verl hands full tensors to verl's own loading",
            stage="settings",
            rank=order.rank,
        )

    assert order.meeting is not None, "an epoch that is open was joined"
    config = RefitConfig(**order.config)
    RefitSession.open(Rendezvous.from_json(order.meeting), order.rank, no_destination, config)
    raise AssertionError("no_destination raises")
