"""Digests of tensors, for comparisons across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Of their bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
