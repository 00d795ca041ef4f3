"""Megatron's names of the layers that get LoRA factors, from those of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

# Where Megatron joins layers, each of them. Bridge has one adapter for all layers that are joined.
_MEGATRON = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
# Latent attention's without its own rank for queries.
_OF_MEGATRON = (*dict.fromkeys(_MEGATRON.values()), "linear_q_proj")


def megatron_targets(target_modules: Sequence[str]) -> tuple[str, ...]:
    """Megatron's names of ``target_modules``, which :func:`target_violations` finds nothing in; ``[all-linear]`` names all."""
    if list(target_modules) == ["all-linear"]:
        return _OF_MEGATRON
    return tuple(dict.fromkeys(_MEGATRON.get(name, name) for name in target_modules))


def target_violations(target_modules: Sequence[str]) -> list[str]:
    """Why Bridge can't put adapters into these layers, one sentence each with the remedy; empty if it can."""
    if list(target_modules) == ["all-linear"]:
        return []
    unknown = [name for name in target_modules if name not in _MEGATRON and name not in _OF_MEGATRON]
    found = [
        f"{name} is no layer that Megatron has adapters for; give [all-linear], or of {', '.join(_MEGATRON)}, or Megatron's own "
        f"names, {', '.join(_OF_MEGATRON)}"
        for name in unknown[:1]
    ]
    for joined in dict.fromkeys(_MEGATRON[name] for name in target_modules if name in _MEGATRON):
        parts = [name for name, place in _MEGATRON.items() if place == joined]
        absent = [name for name in parts if name not in target_modules]
        if absent and joined not in target_modules:
            found.append(
                f"{', '.join(name for name in parts if name in target_modules)} without {', '.join(absent)}: Megatron joins them in "
                f"{joined}, which has one adapter; give all of them, or {joined}"
            )
    return found
