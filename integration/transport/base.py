"""What a transport of the bulk path offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..comm.group import Group
from ..errors import VerificationError, end_all
from ..layout import Fragment
from ..plan import Message
from ..records.clock import StageClock
from .storage import DeviceMemory


@dataclass(frozen=True)
class TransferResult:
    """Bulk bytes of one refit on one rank: ``payload`` sent or received, ``verified`` of them checked.

    ``void``: a sender's weights lay elsewhere than was thought, so that what came of it counts for nothing. Of a delta refit also
    ``wire_bytes``, that travelled in place of the payload, and ``changed_share``, of its elements that differed from the base.
    ``resharded_bytes``: of the payload, what ``nccl.m2n`` carried.
    """

    payload_bytes: int
    verified_bytes: int
    void: bool = False
    wire_bytes: int | None = None
    changed_share: float | None = None
    resharded_bytes: int = 0


class Transport(ABC):
    """Replays a plan between live parameters.

    Args:
        rank: of the refit world.
        verify: ``off``, ``sampled`` or ``full``, the same on all ranks.
        turn: at which message sampled checks begin, the same on all ranks.
    """

    def __init__(self, rank: int, verify: str, turn: int = 0):
        self.rank = rank
        self.verify = verify
        self._turn = turn
        self._refits = 0
        # Of what is bound, where a sender may check late whether it has moved; and the check that the next refit calls once
        # it has begun to send.
        self._memory: DeviceMemory | None = None
        self._have_moved: Callable[[], bool] | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """As records and errors have it."""

    @property
    def remark(self) -> str:
        """What is to be told of how it serves once it is connected; empty if nothing is."""
        return ""

    @property
    def portions(self) -> Mapping[str, int]:
        """Once it is connected, of each weight that lands here the portion with which the last of it does: :meth:`run` calls a
        receiver's ``landed`` with each. Nothing where it is not called."""
        return {}

    @abstractmethod
    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Make all views and buffers for this rank's fragments. Called again whenever storage has moved."""

    def describe(self) -> object:
        """After ``bind``: what this rank's peers must know of its storage, as plain data for the rendezvous."""
        return None

    def asks_again(self, described: Sequence[object]) -> bool:
        """Read what all ranks described, in the order of ranks: whether all have to bind and describe once more before they
        connect, since it shows only now what they need of each other. The same answer on all ranks.

        Raises:
            RefitMismatch: a rank describes its storage in a form that can't be read.
        """
        return False

    def connect(self, described: Sequence[object]) -> None:  # noqa: B027 - most need nothing of their peers
        """Read what all ranks described, in the order of ranks. After this the transport can run.

        Raises:
            TransportUnavailable: a peer's storage can't be reached by this transport; says why.
        """

    def handles_opened(self) -> int:
        """Of peers' GPU memory, since this was last asked: handles of allocations, and descriptors of chunks."""
        return 0

    def moved(self) -> bool:
        """Whether other memory has come to lie at the addresses that were bound, which needs a new ``bind``."""
        return False

    def check_during_run(self, have_moved: Callable[[], bool]) -> bool:
        """Offer a sender's check for weights that have moved, which takes milliseconds, to the next :meth:`run`.

        Args:
            have_moved: whether some lie elsewhere than they were bound.

        Returns:
            Whether the next :meth:`run` calls it while bytes are on their way. It does if it can surely read all memory that
            was bound, whatever lies there now. If weights have moved, what it sends is void.
        """
        if self._memory is None or not self._memory.still_mapped():
            return False
        self._have_moved = have_moved
        return True

    def confirm_unmoved(self) -> None:
        """The caller has checked that the weights are where they were bound, which :meth:`check_during_run` could not."""
        if self._memory is not None:
            self._memory.confirm_unmoved()

    def _check_moved(self) -> bool:
        """Call what :meth:`check_during_run` accepted, if anything; whether weights have moved."""
        have_moved, self._have_moved = self._have_moved, None
        return have_moved is not None and have_moved()

    def synchronize(self) -> None:  # noqa: B027 - most write on streams that follow the caller's
        """Before any rank runs a refit: wait for this rank's earlier work on its storage.

        The caller lets no rank :meth:`run` before all are through here.

        Raises:
            RefitTimeout: it does not end.
        """

    def release(self) -> None:  # noqa: B027 - most keep nothing of their peers' memory
        """Between refits: unmap memory that its owner may free, as sleeping engines do; :meth:`moved` then asks to bind again."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Close communicators and free memory; safe to call twice. ``failed``: peers may be gone."""

    @abstractmethod
    def run(self, clock: StageClock, meanwhile: Callable[[], None] | None = None) -> TransferResult:
        """Move all bulk bytes of one refit.

        Args:
            clock: of the refit.
            meanwhile: what else this rank exchanges in the refit, called once on the caller's stream, at the same
                place in every rank's order of exchanges; while bulk bytes are on their way, where that can be.

        Raises:
            PeerLost, RefitTimeout: from the wire.
            VerificationError: landed bytes differ from the sent ones.
            Exception: what ``meanwhile`` raises.
        """

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of the buffers that live as long as the epoch."""

    @property
    def _number(self) -> int:
        """Of the refit, for sampled checks: they take the n-th of a pair's messages, n being this number modulo theirs.

        The refits are counted here, so that any sequence of versions comes to all messages; from the epoch's own turn on,
        so that a sequence of short epochs does, too.
        """
        return self._turn + self._refits

    def _checked(self, ordinal: int, of: int) -> bool:
        """Whether the ``ordinal``-th of a pair's ``of`` messages is checked in this refit."""
        return self.verify == "full" or (self.verify == "sampled" and ordinal == self._number % of)


class GroupTransport(Transport):
    """A transport over a group of its own."""

    def __init__(self, group: Group, rank: int, verify: str, turn: int = 0):
        super().__init__(rank, verify, turn)
        self.group = group
        self._open = [group]

    def close(self, *, failed: bool = False) -> None:
        opened, self._open = self._open, []
        end_all(partial(group.close, failed=failed) for group in opened)


def damaged(message: Message, rank: int) -> VerificationError:
    """The error for a message whose landed bytes have another checksum than the sent ones."""
    names = sorted({s.name for s in message.segments})
    return VerificationError(
        f"what landed from refit rank {message.source} in round {message.round_index} is not what was sent; one of "
        f"{len(names)} weights is damaged: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}. The engine stays "
        "dirty. Either the wire corrupts data or the trainer changed weights during the refit.",
        stage="verify",
        rank=rank,
        parameter=names[0],
    )
