"""Tiny models that give each token one successor, with MTP layers that always draft it or never do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .checkpoints import write_checkpoint

# Tokens, of which each has a dimension of its own.
SIZE = 64


def write_chain(
    family: str, folder: Path, seed: int, *, drafts: bool, changes: Mapping[str, Any] | None = None
) -> list[int]:
    """Write a BF16 checkpoint of a family whose checkpoints have an MTP layer.

    Args:
        family: of ``CONFIGS`` in :mod:`.checkpoints`.
        folder: where to.
        seed: decides the successors, and all that the outputs do not depend on.
        drafts: whether the MTP layer knows the successors; else it gives them the least of all probabilities.
        changes: of the family's configuration.

    Returns:
        The successor of each token.
    """
    keys = {"vocab_size": SIZE, "hidden_size": SIZE, **(changes or {})}
    write_checkpoint(family, folder, short=True, changes=keys)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SIZE, generator=generator)
    one = torch.eye(SIZE)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        value = torch.randn(tensor.shape, generator=generator)
        if "norm.weight" in name:
            value = 1 + value.abs()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            # Nothing of a layer but its input goes on.
            value = torch.zeros(tensor.shape)
        elif "embed_tokens" in name:
            value = one
        elif "head.weight" in name:
            value = one[order.argsort()]
        elif name.endswith("eh_proj.weight"):
            value = torch.cat((one if drafts else -one, torch.zeros(SIZE, SIZE)), dim=1)
        tensors[name] = value.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return [int(token) for token in order]


def successors(prompt: Sequence[int], chains: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that follow a prompt, each by its own chain."""
    found = [prompt[-1]]
    for chain in chains:
        found.append(chain[found[-1]])
    return found[1:]
