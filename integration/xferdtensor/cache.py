"""Compiled transfers, kept for the layouts that a process group has seen lately."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..comm.group import Group
from ..comm.torch_group import TorchGroup
from ..errors import VerificationError
from ..layout import Fragment
from ..packing import make_copy
from ..plan import BroadcastPlan, Plan
from ..records.clock import StageClock
from ..transport import GoldenTransport, P2PTransport, TransferResult
from ..transport.m2n import Communicators, M2nTransport, ReshardPlan, new_ids, unavailable
from .reshard import NAME, LocalPart, RankPart, Reshard, Side

# Transfers that are kept for each process group and set of ranks; an older layout is agreed upon and compiled anew.
KEPT = 256
# Of a communicator's id (NCCL_UNIQUE_ID_BYTES).
_ID_BYTES = 128


@dataclass(frozen=True)
class Request:
    """What ranks were called with, apart from their tensors; ``shape`` is None until it is known."""

    source: Side
    destination: Side
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    transport: str
    bucket_bytes: int
    verify: str

    @property
    def members(self) -> frozenset[int]:
        """The ranks that take part."""
        return frozenset(self.source.mesh.ranks) | frozenset(self.destination.mesh.ranks)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of a complete request."""
        assert self.shape is not None, "agreement completes a request before it is compiled"
        return self.shape

    def with_shape(self, shape: tuple[int, ...]) -> Request:
        """The same of a tensor of ``shape``."""
        return replace(self, shape=shape)


@dataclass
class Compiled:
    """A transfer as one rank runs it; holds no storage between runs.

    Attributes:
        digest: of what all ranks compute alike.
        part: this rank's.
        clock: of the runs.
        transport: made at the first run, when all have agreed; none for broadcasts.
        agreed: whether all ranks have compared the request.
        turn: at which message the next run's sampled checks would begin; the same on all ranks.
    """

    digest: str
    part: RankPart
    clock: StageClock
    transport: P2PTransport | None = None  # or the one by nccl.m2n, which has its rounds
    agreed: bool = False
    turn: int = 0


class Transfers:
    """The transfers of one process group, device and timeout.

    They are kept, counted and dropped apart for each set of ranks that take part: all of these see the same calls
    in the same order, so that what one of them has dropped, and asks its peers about anew, they have dropped too.
    """

    def __init__(self, group: TorchGroup):
        self.group = group
        self._communicators: Communicators | None = None
        self._compiled: dict[frozenset[int], OrderedDict[Request, Compiled]] = {}

    @staticmethod
    def of(group: dist.ProcessGroup | Group, device: torch.device, timeout_s: float) -> Transfers:
        """Those of a process group; they end with it.

        Raises:
            RefitError: it can't move tensors on ``device``.
        """
        with _lock:
            known = _by_group.setdefault(group, {})
            found = known.get((device, timeout_s))
            if found is None:
                found = known[device, timeout_s] = Transfers(TorchGroup.over(group, device, timeout_s))
            return found

    def lacks(self, request: Request) -> str:
        """What this rank lacks for a request's transport; empty if nothing."""
        if request.transport != "m2n":
            return ""
        lanes = 1 if self._communicators is None else 0
        return unavailable(self.group.device, request.bucket_bytes, lanes)

    def agreed(self, request: Request) -> bool:
        """Whether all ranks have compared this request, and keep it since; the same on all of them."""
        kept = self._compiled.get(request.members)
        return kept is not None and request in kept and kept[request].agreed

    def agree(self, request: Request, turn: int) -> None:
        """Note that all ranks have compared it, and at which message its sampled checks begin."""
        compiled = self.compile(request)
        compiled.agreed, compiled.turn = True, turn

    def compile(self, request: Request) -> Compiled:
        """The transfer of a complete request; errors as for :class:`~.reshard.Reshard`."""
        kept = self._compiled.setdefault(request.members, OrderedDict())
        found = kept.pop(request, None)
        if found is None:
            found = self._compile(request)
        kept[request] = found
        while len(kept) > KEPT:
            kept.popitem(last=False)
        return found

    def run(self, request: Request, src: torch.Tensor | None, dst: torch.Tensor | None) -> TransferResult:
        """Move this rank's part between its local tensors; errors as for a transport's run."""
        compiled = self.compile(request)
        part, shape = compiled.part, request.full_shape
        if src is not None and dst is not None:
            copies = [(src[held], dst[wanted]) for held, wanted in part.copied]
            make_copy(copies, self.group.device).launch()
        fragments = _fragments(part.sent, src, shape) + _fragments(part.received, dst, shape)
        compiled.clock.restart()
        if isinstance(part.plan, BroadcastPlan):
            # Made for each run, and so told which one it is.
            golden = GoldenTransport(
                self.group, self.group.rank, part.plan, request.verify, compiled.turn, is_source=dst is None
            )
            compiled.turn += 1
            golden.bind(fragments)
            self.group.connect_broadcast(0)
            return golden.run(compiled.clock)
        return self._exchange(compiled, part.plan, request.verify, request.bucket_bytes, fragments)

    def _exchange(
        self,
        compiled: Compiled,
        plan: Plan,
        verify: str,
        bucket_bytes: int,
        fragments: Sequence[Fragment],
    ) -> TransferResult:
        if compiled.transport is None:
            group, turn = self.group, compiled.turn
            compiled.transport = (
                M2nTransport(group, self._open_m2n(bucket_bytes), group.rank, plan, verify, turn)
                if isinstance(plan, ReshardPlan)
                else P2PTransport(group, group.rank, plan, verify, turn)
            )
        compiled.transport.bind(fragments)
        # Nothing is passed on here, so peers have nothing to tell.
        compiled.transport.connect([{"turns": {}}] * self.group.size)
        try:
            result = compiled.transport.run(compiled.clock)
        except VerificationError:
            # All has landed.
            compiled.transport.unbind()
            raise
        except BaseException:
            # NCCL may be writing the buckets: only when it has given up may their memory become another's.
            if self.group.abort():
                compiled.transport.unbind(failed=True)
            raise
        compiled.transport.unbind()
        return result

    def _compile(self, request: Request) -> Compiled:
        reshard = Reshard(
            request.source, request.destination, request.full_shape, request.dtype, request.bucket_bytes
        )
        rank = self.group.rank
        parts = {"golden": reshard.golden_part, "m2n": reshard.m2n_part}
        part = parts.get(request.transport, reshard.part)(rank)
        digest = reshard.digest + (part.plan.carried.digest if isinstance(part.plan, ReshardPlan) else "")
        return Compiled(digest, part, StageClock(self.group.device))

    def _open_m2n(self, bucket_bytes: int) -> Communicators:
        """The group's communicator of ``nccl.m2n``, made at its first use; no call that :meth:`lacks` nothing needs more memory of it."""
        if self._communicators is None:
            group = self.group
            row = torch.zeros(_ID_BYTES, dtype=torch.uint8, device=group.device)
            if group.rank == 0:
                row.copy_(torch.frombuffer(bytearray(new_ids(1)[0]), dtype=torch.uint8))
            group.connect_broadcast(0)
            group.broadcast(row, 0, "connect")
            self._communicators = Communicators(
                [bytes(row.tolist())],
                group.rank,
                group.size,
                False,
                group.device,
                bucket_bytes,
                group.timeout_s,
                # Not check_peers, which gives the group's communicators up while a reshard may be under way.
                group.watch,
            )
        return self._communicators


_lock = threading.Lock()
_by_group: WeakKeyDictionary[object, dict[tuple[torch.device, float], Transfers]] = WeakKeyDictionary()


def _fragments(
    parts: Sequence[LocalPart], local: torch.Tensor | None, shape: tuple[int, ...]
) -> list[Fragment]:
    return [Fragment(NAME, shape, part.box, local[part.place]) for part in parts] if local is not None else []
