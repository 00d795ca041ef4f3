"""Compiled transfers, kept for the layouts that a process group has seen lately."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..clock import StageClock
from ..layout import Fragment
from ..packing import make_copy
from ..plan import BroadcastPlan, Plan
from ..process_groups import BorrowedGroup, Group
from ..transport import GoldenTransport, P2PTransport, TransferResult
from .reshard import NAME, LocalPart, RankPart, Reshard, Side

# Transfers that are kept for each process group; an older layout is compiled anew, without asking the peers.
KEPT = 256


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
    """

    digest: str
    part: RankPart
    clock: StageClock
    transport: P2PTransport | None = None


class Transfers:
    """The transfers of one process group, device and timeout."""

    def __init__(self, group: BorrowedGroup):
        self.group = group
        self._agreed: set[Request] = set()
        self._compiled: OrderedDict[Request, Compiled] = OrderedDict()

    @staticmethod
    def of(lender: dist.ProcessGroup | Group, device: torch.device, timeout_s: float) -> Transfers:
        """Those of a process group; they end with it.

        Raises:
            RefitError: it can't move tensors on ``device``.
        """
        with _lock:
            known = _by_lender.setdefault(lender, {})
            found = known.get((device, timeout_s))
            if found is None:
                found = known[device, timeout_s] = Transfers(BorrowedGroup(lender, device, timeout_s))
            return found

    def agreed(self, request: Request) -> bool:
        """Whether all ranks have compared this request before. Never forgotten, or ranks would differ in it."""
        return request in self._agreed

    def agree(self, request: Request) -> None:
        """Note that all ranks have compared it."""
        self._agreed.add(request)

    def compile(self, request: Request) -> Compiled:
        """The transfer of a complete request; errors as for :class:`~.reshard.Reshard`."""
        found = self._compiled.pop(request, None)
        if found is None:
            found = self._compile(request)
        self._compiled[request] = found
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
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
            golden = GoldenTransport(
                self.group, self.group.rank, part.plan, request.verify, is_source=dst is None
            )
            golden.bind(fragments)
            return golden.run(compiled.clock)
        return self._exchange(compiled, part.plan, request.verify, fragments)

    def _exchange(
        self, compiled: Compiled, plan: Plan, verify: str, fragments: Sequence[Fragment]
    ) -> TransferResult:
        if compiled.transport is None:
            compiled.transport = P2PTransport(self.group, self.group.rank, plan, verify)
        compiled.transport.bind(fragments)
        # Peers say nothing of their strides, so everything is staged.
        nothing: dict[str, dict[str, str]] = {"sends": {}, "receives": {}, "turns": {}}
        compiled.transport.connect([nothing] * self.group.size)
        try:
            return compiled.transport.run(compiled.clock)
        finally:
            compiled.transport.release()

    def _compile(self, request: Request) -> Compiled:
        reshard = Reshard(
            request.source, request.destination, request.full_shape, request.dtype, request.bucket_bytes
        )
        rank = self.group.rank
        part = reshard.golden_part(rank) if request.transport == "golden" else reshard.part(rank)
        return Compiled(reshard.digest, part, StageClock(self.group.device))


_lock = threading.Lock()
_by_lender: WeakKeyDictionary[object, dict[tuple[torch.device, float], Transfers]] = WeakKeyDictionary()


def _fragments(
    parts: Sequence[LocalPart], local: torch.Tensor | None, shape: tuple[int, ...]
) -> list[Fragment]:
    return [Fragment(NAME, shape, part.box, local[part.place]) for part in parts] if local is not None else []
