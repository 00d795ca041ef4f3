"""INT4 checkpoints in compressed-tensors' ``pack-quantized`` form: what stands in a weight's place, and what tells an engine of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .formats import Int4, wire_names

_SHAPE_END = "_shape"


def shape_name(weight: str) -> str:
    """Of the constant ``[n, k]`` beside codes and scales: ``int64`` ``[2]``."""
    return weight + _SHAPE_END


def packed_tensors(name: str, weight: torch.Tensor, format: Int4) -> Iterator[tuple[str, torch.Tensor]]:
    """Codes, scales and shape of a whole weight ``[n, k]`` in the format's dtype.

    Raises:
        ValueError: it holds NaN or infinity, for which there are no codes.
    """
    codes, scales = format.encode(weight)
    if bool(scales.isnan().any()):
        raise ValueError(
            f"{name} holds NaN or infinity, of which INT4 has no codes; look for a diverged step, or go back to good weights"
        )
    yield from zip(wire_names(name, format), (codes, scales), strict=True)
    yield shape_name(name), torch.tensor(weight.shape)


def quantization_config(group: int, ignore: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it for W4A16.

    Args:
        group: elements of a row that share a scale.
        ignore: linear layers that are not quantized: names of modules, or regular expressions behind ``re:``.
    """
    numbers = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": True,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
        "ignore": list(ignore),
    }
