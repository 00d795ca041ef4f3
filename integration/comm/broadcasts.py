"""Broadcasts and maxima among the ranks of a process group."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from .errors import classifying
from .waits import GroupWaits


class GroupBroadcasts(GroupWaits):
    """What all ranks of a group do at once."""

    def prepare_broadcast(self, root: int) -> None:
        """Set up ahead of use what broadcasts from ``root`` need; all ranks at the same time.

        NCCL connects in the first broadcast, and there it would block without a limit of time.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """
        if self.device.type == "cuda" and not self._greeted:
            for lane in range(self.lanes):
                self._guarded(partial(self._hello, lane), "connect")
        self._greeted = True

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        """Broadcast a contiguous buffer from the group's rank ``root`` and wait; errors as in :meth:`Group.exchange`."""
        with classifying(stage, self.rank, f"from group rank {root}"):
            self._start_broadcast(buffer, root, 0)
        self._wait_for_stream(stage)

    def prepare_maximum(self, row: torch.Tensor) -> None:
        """Set up ahead of use what :meth:`maximum` of such a row needs; as :meth:`prepare_broadcast`.

        NCCL connects for each of its algorithms apart, and chooses it by size: so this is a maximum of that size.
        """
        if self.device.type == "cuda":
            self._guarded(partial(self._first_maximum, torch.zeros_like(row)), "connect")

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        """Set a contiguous row of numbers to the largest that any rank has in each place, and wait; as :meth:`broadcast`."""
        with classifying(stage, self.rank, "of maxima"):
            self._start_maximum(row)
        self._wait_for_stream(stage)

    def _start_maximum(self, row: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = self.timeout
        self.backend(0).allreduce([row], options).wait()

    def _first_maximum(self, row: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            self._start_maximum(row)
            torch.cuda.current_stream(self.device).synchronize()

    def _hello(self, lane: int) -> None:
        with torch.cuda.device(self.device):
            self._start_broadcast(torch.zeros(1, device=self.device), 0, lane)
            torch.cuda.current_stream(self.device).synchronize()

    def _start_broadcast(self, buffer: torch.Tensor, root: int, lane: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self.timeout
        self._backends[lane].broadcast([buffer], options).wait()
