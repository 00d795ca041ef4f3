"""Broadcasts and maxima among the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .group_errors import classifying
from .group_waits import GroupWaits


class GroupBroadcasts(GroupWaits):
    """What all ranks of a group do at once."""

    def prepare_broadcast(self, root: int) -> None:
        """Set up ahead of use what broadcasts from ``root`` need; all ranks at the same time.

        NCCL and gloo have set up all when the group was made.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        """Broadcast a contiguous buffer from the group's rank ``root`` and wait; errors as in :meth:`Group.exchange`."""
        with classifying(stage, self.rank, f"from group rank {root}"):
            self._start_broadcast(buffer, root, 0)
        self._wait_for_stream(stage)

    def prepare_maximum(self) -> None:
        """Set up ahead of use what :meth:`maximum` needs; as :meth:`prepare_broadcast`."""

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        """Set a contiguous row of numbers to the largest that any rank has in each place, and wait; as :meth:`broadcast`."""
        with classifying(stage, self.rank, "of maxima"):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.timeout = self.timeout
            self.backend(0).allreduce([row], options).wait()
        self._wait_for_stream(stage)

    def _start_broadcast(self, buffer: torch.Tensor, root: int, lane: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self.timeout
        self._backends[lane].broadcast([buffer], options).wait()
