"""Weights that full-tensor updates find hard: what the tests of both frameworks send."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Over several buckets of 1 MiB: one larger than two of them, odd sizes, scalars and types that torch can't add up.
SPECS = {
    "model.embed_tokens.weight": ((1200, 1024), torch.bfloat16),
    "model.layers.0.input_layernorm.weight": ((513,), torch.float32),
    "model.layers.0.self_attn.q_proj.weight": ((256, 1024), torch.bfloat16),
    "model.layers.0.mlp.experts.0.w.weight": ((300, 1000), torch.float8_e4m3fn),
    "model.layers.0.mlp.gate.e_score_correction_bias": ((8,), torch.float32),
    "model.layers.0.scale": ((), torch.float32),
    "model.layers.0.one": ((1,), torch.float32),
    "model.layers.0.steps": ((2,), torch.int64),
    "model.norm.weight": ((7,), torch.float16),
    "lm_head.weight": ((400, 1024), torch.float32),
}


def weight(name: str, version: int) -> torch.Tensor:
    """A whole weight at a version."""
    shape, dtype = SPECS[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + version)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def as_exported(whole: torch.Tensor) -> torch.Tensor:
    """Not contiguous, as exports of fused weights are; one element with a stride, as of a column, which counts as contiguous."""
    if whole.dim() == 1:
        return torch.stack([whole] * 7, -1)[:, 3]
    return whole.t().contiguous().t() if whole.dim() == 2 else whole


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def wrong(found: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """What is not, bit for bit, as it is at ``version``."""
    return sorted(found.keys() - SPECS.keys()) + [
        name
        for name, (shape, dtype) in SPECS.items()
        if name not in found
        or (found[name].shape, found[name].dtype) != (torch.Size(shape), dtype)
        or not torch.equal(bytes_of(found[name]), bytes_of(weight(name, version)))
    ]
