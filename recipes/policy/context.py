"""Rows of a batch over the context-parallel ranks of Megatron, each of which computes a part of every row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...workers.trainers.megatron.zigzag import row_order, token_places


def own_tokens(rows: Tensor) -> Tensor:
    """This rank's part ``[B, S / CP]`` of ``[B, S]``; S is a multiple of ``2 * CP``."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return rows
    rank = parallel_state.get_context_parallel_rank()
    return rows.index_select(1, token_places(rows.shape[1], rank, ranks, rows.device))


def whole_rows(own: Tensor) -> Tensor:
    """``[B, S]``, equal on all ranks, from each one's part. A collective.

    A gradient reaches each rank's own part alone: all ranks compute the loss of whole rows, and none of them has to be told
    what the others' would be.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return own
    gathered = own.new_empty(ranks, *own.shape)
    group = parallel_state.get_context_parallel_group()
    dist.all_gather(list(gathered), own.detach().contiguous(), group=group)
    parts = list(gathered)
    parts[parallel_state.get_context_parallel_rank()] = own
    whole = torch.cat(parts, 1)
    return whole.index_select(1, row_order(whole.shape[1], ranks, own.device))
