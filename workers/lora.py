"""What trainer and engine tell each other of a LoRA adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from ..integration.errors import RefitMismatch

# The name under which the settings travel, as the file beside the factors is called in an adapter's checkpoint.
SETTINGS_NAME = "adapter_config.json"
# What peft's adapter checkpoints put before the base model's names.
PREFIX = "base_model.model."
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
