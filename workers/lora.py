"""What trainer and engine tell each other of a LoRA adapter, and what a configuration of LoRA may ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..integration.config import RefitConfig
from ..integration.errors import RefitMismatch

# The name under which the settings travel, as the file beside the factors is called in an adapter's checkpoint.
SETTINGS_NAME = "adapter_config.json"
# What peft's adapter checkpoints put before the base model's names.
PREFIX = "base_model.model."
# Fields of a LoraConfig that make the delta another one than scaling * B @ A, or add to more than weights of layers.
_NOT_PLAIN = (
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "megatron_config",
    "arrow_config",
    "use_bdlora",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "mica",
    "kasa_config",
)
# Of peft's init_lora_weights those that leave the base weights as they are, beside true and false.
_INIT_OF_FACTORS = frozenset({"gaussian", "eva", "orthogonal", "mica"})


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter's factors don't say by themselves.

    Attributes:
        ranks: ``r`` of each layer, by its path in the base model.
        scalings: what multiplies ``B @ A`` there, whatever rule it comes from.
    """

    ranks: Mapping[str, int]
    scalings: Mapping[str, float]

    def to_tensor(self) -> torch.Tensor:
        """The settings as bytes, which travel like a weight."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @staticmethod
    def from_tensor(data: torch.Tensor) -> AdapterSettings:
        """Inverse of :meth:`to_tensor`.

        Raises:
            RefitMismatch: these are no settings.
        """
        try:
            fields = json.loads(bytes(data.cpu().numpy()).decode())
            return AdapterSettings(**fields)
        except (ValueError, TypeError) as error:
            raise RefitMismatch(
                f"what came as the adapter's settings is none ({error}); do both sides run the same rlrefit?",
                stage="misc",
                parameter=SETTINGS_NAME,
            ) from error


def changes_base(init_lora_weights: object) -> bool:
    """Whether peft may write the base weights as it makes an adapter so (PiSSA, OLoRA, LoftQ, …)."""
    return isinstance(init_lora_weights, str) and init_lora_weights.lower() not in _INIT_OF_FACTORS


def split_name(name: str) -> tuple[str, str] | None:
    """Path of the layer and factor (``A`` or ``B``) of a name as adapter checkpoints have them; None for another name."""
    for factor in "AB":
        for ending in (f".lora_{factor}.weight", f".lora_embedding_{factor}"):
            if name.startswith(PREFIX) and name.endswith(ending):
                return name.removeprefix(PREFIX).removesuffix(ending), factor
    return None


def lora_violations(
    refit: RefitConfig,
    lora: Mapping[str, Any],
    engine: str,
    engine_options: Mapping[str, Any],
    prefix: str = "policy",
) -> list[str]:
    """All that is wrong with a configuration of LoRA, one sentence each, with the remedy; empty if nothing is.

    For trainers of one's own, before anything is started: what a live model or engine shows is checked again when the
    ranks meet. Recipes train no adapters.

    Args:
        refit: how weights travel.
        lora: fields of peft's ``LoraConfig``.
        engine: ``vllm`` or ``transformers``.
        engine_options: of vLLM its arguments (``enable_lora``, ``max_lora_rank``, ``max_loras``, ``load_format``); of the
            transformers engine ``tensor_parallel_size``.
        prefix: where ``refit`` and ``lora`` stand in the configuration.
    """
    found = [
        f"{prefix}.lora.{field}: neither way of the refit knows what it makes of the weights; the engine would compute "
        "something else than the trainer. Leave it out"
        for field in _NOT_PLAIN
        if lora.get(field)
    ]
    if refit.lora != "adapter":
        if engine == "vllm" and engine_options.get("enable_lora"):
            found.append(
                f"{prefix}.refit.lora: merge writes the engine's base weights, whose modules enable_lora wraps; set it to "
                "adapter, or start vLLM without enable_lora"
            )
        return found
    if lora.get("modules_to_save"):
        found.append(
            f"{prefix}.lora.modules_to_save: refit.lora=adapter sends factors alone, so the engine would keep the base "
            "model's copy of them; leave it out, or set refit.lora to merge"
        )
    if lora.get("bias", "none") != "none":
        found.append(
            f"{prefix}.lora.bias: refit.lora=adapter sends factors alone, so the engine would keep the base model's "
            "biases; give none, or set refit.lora to merge"
        )
    if changes_base(init := lora.get("init_lora_weights")):
        found.append(
            f"{prefix}.lora.init_lora_weights: {init} writes the base weights, and refit.lora=adapter leaves the engine those of "
            "the checkpoint; leave it out, or set refit.lora to merge"
        )
    if engine == "vllm":
        found += _vllm_violations(lora, engine_options, prefix)
    elif engine_options.get("tensor_parallel_size", 1) > 1:
        found.append(
            f"{prefix}.refit.lora: the transformers engine takes adapters at tensor parallelism 1 alone; use more "
            "replicas, vLLM, or merge"
        )
    return found


def _vllm_violations(lora: Mapping[str, Any], options: Mapping[str, Any], prefix: str) -> list[str]:
    found = []
    if not options.get("enable_lora"):
        found.append(
            f"{prefix}.refit.lora: adapter needs an engine that serves LoRA; start vLLM with enable_lora=True, or set it "
            "to merge"
        )
    rank = max([int(lora.get("r", 8)), *(lora.get("rank_pattern") or {}).values()])
    most = options.get("max_lora_rank", 16)
    if rank > most:
        found.append(
            f"{prefix}.lora.r: rank {rank} is above the engine's max_lora_rank, {most}; raise that to at least {rank}"
        )
    if options.get("load_format") == "dummy":
        found.append(
            f"{prefix}.refit.lora: adapter leaves the engine's base weights as they were loaded, and load_format=dummy "
            "makes them random; set load_format to auto, or lora to merge"
        )
    return found
