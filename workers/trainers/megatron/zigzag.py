"""Which tokens of a row each context-parallel rank has, as Transformer Engine and Megatron's rotary embedding want them.

A row is cut into twice as many chunks as there are ranks. Rank r has chunks r and ``2 * ranks - 1 - r``: a token attends to
those before it, so that one early and one late chunk are as much work for every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_places(tokens: int, rank: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """Places in a row of the tokens that ``rank`` has, in its order.

    Args:
        tokens: of the row; a multiple of ``2 * ranks``.
        rank: among the context-parallel ranks.
        ranks: how many there are.
        device: of the result.

    Returns:
        ``[tokens // ranks]`` int64.
    """
    chunks = torch.arange(tokens, device=device).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def row_order(tokens: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """What brings the tokens of all ranks, one rank's behind the other's, into the row's order: ``[tokens]`` int64."""
    return torch.cat([token_places(tokens, rank, ranks, device) for rank in range(ranks)]).argsort()
