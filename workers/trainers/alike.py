"""What ranks make sure of before they gather together: that all of them will, and of the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...integration.errors import RefitError

# Characters of what was told that an error shows.
_SHOWN = 300


def require_alike(
    look: Callable[[], str], what: str, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Check that ``look`` succeeds on all ranks and tells them the same; one small collective of each group.

    A rank that failed alone would leave the others in their next collective, and one that gathers something else would give them
    its values for theirs.

    Args:
        look: takes part in no collective of these groups.
        what: it tells, for the error.
        groups: one after another, they join all ranks that gather together (the dimensions of a mesh, say); none where each is alone.
        device: of the collectives.

    Raises:
        RefitError: on every rank. On one that failed it is that rank's own.
    """
    told, failure = "", None
    try:
        told = look()
    except RefitError as error:
        failure = error
    number = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7])
    failed = -1 if failure is None else dist.get_rank() if groups else 0
    highest, lowest, failed = _highest([number, -number, failed], groups, device)
    if failure is not None:
        raise failure
    if failed >= 0:
        raise RefitError(
            f"rank {failed} of the trainer can't send its weights, as its own error says, and this rank would wait for its part of "
            "them. Nothing was sent",
            stage="export",
        )
    if highest != -lowest:
        raise RefitError(
            f"ranks of the trainer have different {what}, and parts of these would be put together for one. Nothing was sent. Give "
            f"all ranks the same. This rank has {told if len(told) < _SHOWN else f'{told[:_SHOWN]} …'}",
            stage="export",
        )


def _highest(numbers: list[int], groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[int]:
    if not groups:
        return numbers
    together = torch.tensor(numbers, dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    found: list[int] = together.tolist()
    return found
