"""One rank's own work between collectives: what fails on one trainer rank fails on all, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ....integration.errors import RefitError


def on_all_ranks[T](what: str, work: Callable[[], T]) -> T:
    """What ``work`` returns, once it has succeeded on all trainer ranks; a collective of them.

    Args:
        what: the work, for the error.
        work: takes part in no collective, or a rank that raises would leave the others in it.

    Raises:
        RefitError: on every rank, if ``work`` raised on any. On a rank that failed, it has the cause.
    """
    failure: Exception | None = None
    try:
        done = work()
    except Exception as error:  # whatever it is, the others must hear of it before it is raised
        failure = error
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, "" if failure is None else f"{type(failure).__name__}: {failure}")
    failed = {rank: text for rank, text in enumerate(told) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        more = f", and on {len(failed) - 1} more ranks" if len(failed) > 1 else ""
        raise RefitError(
            f"{what} failed on trainer rank {rank}{more}: {text}. The refit can't be prepared, nothing was sent. The "
            "traceback is on that rank; the model family may not be supported by this version of rlrefit with the "
            "installed Megatron-Bridge, and policy.nccl_xfer_refit: false then refits through Bridge's export alone",
            stage="prepare",
        ) from failure
    return done
