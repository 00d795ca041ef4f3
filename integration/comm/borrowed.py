"""Process groups over communicators that somebody else made and closes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import RefitError
from .torch_group import Group


class BorrowedGroup(Group):
    """Communicators that somebody else made and closes: a torch ``ProcessGroup``'s, or another group's.

    After a timeout or an abort they are given up, and their owner can't use them any more either.
    """

    def __init__(
        self,
        lender: dist.ProcessGroup | Group,
        device: torch.device,
        timeout_s: float,
    ):
        """Use the lender's communicators; ranks are counted as it does.

        Args:
            lender: one with NCCL for a CUDA ``device``, with gloo for the CPU.
            device: of what will travel.
            timeout_s: limit of any exchange, in seconds.

        Raises:
            RefitError: the lender has no backend for the device, or is closed.
        """
        rank, size = (
            (lender.rank, lender.size) if isinstance(lender, Group) else (lender.rank(), lender.size())
        )
        backends = _lent(lender, device)
        if not backends:
            raise RefitError(
                f"the process group can't move tensors on {device}: it is closed, or has no backend for them. Move the "
                "tensors, or give a group made for their device (NCCL for cuda, gloo for cpu)",
                stage="process group",
                rank=rank,
            )
        watch = lender._watch if isinstance(lender, Group) else _watch_nothing
        self._configure(rank, size, device, timeout_s, watch, len(backends))
        self._backends = backends

    def close(self, *, failed: bool = False) -> None:
        """Return the communicators; they stay open."""
        self._backends = []


def _watch_nothing(stage: str) -> None:
    """For a group whose ranks have no other channel to say that they give up."""


def _lent(lender: dist.ProcessGroup | Group, device: torch.device) -> list[Any]:
    """The lender's backends that serve tensors on ``device``; none if it has none."""
    if isinstance(lender, Group):
        same = lender.device.type == device.type and lender.device.index in (None, device.index)
        return list(lender._backends) if same else []
    if device.type not in {known.type for known in lender._device_types}:
        return []
    backend = lender._get_backend(torch.device(device.type))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    wanted = "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"
    return [backend] if isinstance(backend, getattr(dist, wanted, ())) else []
