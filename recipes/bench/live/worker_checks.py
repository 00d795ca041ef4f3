"""What the benchmark does to a worker's live model beside the refit, whichever engine's it is: poison and checksums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ....integration.packing.copies import make_checksums
from .engine import Checksums


def poison(model: nn.Module, embedding: type[nn.Module], has_padding: Callable[[nn.Module], bool]) -> int:
    """Fill all parameters with NaN; returns their bytes.

    What no checkpoint tensor reaches becomes 0, as the engine's loader leaves it.

    Args:
        model: with its parameters where they are served.
        embedding: the engine's class of embeddings whose vocabulary is padded.
        has_padding: whether elements of another module are never loaded.
    """
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(0.0 if has_padding(module) else torch.nan)
            if isinstance(module, embedding):
                module.weight[module.shard_indices.num_org_elements :].fill_(0.0)
    return sum(parameter.nbytes for parameter in model.parameters())


def checksums(model: nn.Module, device: torch.device) -> Checksums:
    """For each live parameter a checksum of its bytes (two numbers), and how many of its elements are NaN."""
    parameters = dict(model.named_parameters())
    sums = torch.zeros(len(parameters), 2, dtype=torch.int64, device=device)
    views = [(parameter.detach(), 0) for parameter in parameters.values()]
    make_checksums(views, device, range(len(views))).compute(sums)
    nans = torch.stack([torch.isnan(view).sum() for view, _ in views]).tolist()
    return {name: [*pair, nan] for name, pair, nan in zip(parameters, sums.tolist(), nans, strict=True)}


def synchronize(device: torch.device) -> None:
    """Wait for what the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
