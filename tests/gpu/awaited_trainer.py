"""The trainer that takes turns with an ``AsyncLLM``, and the checkpoints that it takes on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from .test_colocated_stages_on_gpu import LateTrainer
from .vllm_checkpoints import read_checkpoint

# Weights of 0.3 GB.
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
# What vLLM makes one parameter of; the modules of transformers have it in the same order.
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


@dataclass(frozen=True)
class Sampled:
    """What one request gave; ``versions`` are those of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: set[int]

    def values(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


def write_checkpoint(folder: Path, seed: int) -> str:
    import transformers

    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / str(seed))
    return str(folder / str(seed))


class Trainer(LateTrainer):
    """Learns for the sake of its gradients and momenta, which have to leave, and takes on the weights of a checkpoint."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(Path(paths[0]))
        self._paths = paths

    def step(self, version: int) -> None:
        self.learn(version)
        self.model.load_state_dict(read_checkpoint(self._paths[version % 2]))

    def digests(self) -> dict[str, str]:
        """As the extension's ``refit_parameter_digests``."""
        parts: dict[str, list[torch.Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            kind = name.split(".")[-2]
            parts.setdefault(name.replace(kind, FUSED.get(kind, kind)), []).append(parameter.detach().cpu())
        return {name: _digest(torch.cat(found)) for name, found in parts.items()}

    def apart(self, said: list[Sampled]) -> float:
        """The largest difference to what the engine has said."""
        ours = self.logprobs([(one.prompt, one.tokens) for one in said])
        pairs = zip(ours, (one.logprobs for one in said), strict=True)
        return max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))


def _digest(tensor: torch.Tensor) -> str:
    header = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(header + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
