"""Weights to send, without a trainer around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rlrefit.integration.weights.manifest import TensorSpec


class ListSource:
    """Implements ``WeightSource`` for weights in a dictionary, which a test may change between refits."""

    device = torch.device("cpu")

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.prepared = 0

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.weights.items()]

    def prepare(self) -> None:
        self.prepared += 1

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, self.weights[name]) for name in names)


def some_weights(seed: int = 0, layers: int = 2) -> dict[str, torch.Tensor]:
    """Two layers in BF16, of which one is packed in NVFP4 and one has FP8 codes."""
    draw = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 127, shape, dtype=torch.uint8, generator=draw)

    found = {"model.embed_tokens.weight": floats(32, 16)}
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            found[f"model.layers.{layer}.self_attn.{name}.weight"] = floats(16, 16)
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.{layer}.mlp.{name}"
            if layer:
                found[f"{module}.weight"] = codes(16, 16).view(torch.float8_e4m3fn)
                found[f"{module}.weight_scale_inv"] = floats(1, 1).float()
            else:
                found[f"{module}.weight"] = codes(16, 8)
                found[f"{module}.weight_scale"] = codes(16, 1).view(torch.float8_e4m3fn)
                found[f"{module}.weight_scale_2"] = floats(1).float()[0].abs()
                found[f"{module}.input_scale"] = floats(1).float()[0].abs()
    return found
