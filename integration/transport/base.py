"""What a transport of the bulk path offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import VerificationError
from ..layout import Fragment
from ..plan import Message
from ..process_groups import Group
from ..records import StageClock


@dataclass(frozen=True)
class TransferResult:
    """Bulk bytes of one refit on one rank: ``payload`` sent or received, ``verified`` of them checked."""

    payload_bytes: int
    verified_bytes: int


class Transport(ABC):
    """Replays a plan between live parameters."""

    name: str

    def __init__(self, rank: int, verify: str):
        self.rank = rank
        self.verify = verify
        self._refits = 0

    @abstractmethod
    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Make all views and buffers for this rank's fragments; again whenever storages have moved."""

    def describe(self) -> object:
        """After ``bind``: what this rank's peers must know of its storage, as plain data for the rendezvous."""
        return None

    def connect(self, described: Sequence[object]) -> None:  # noqa: B027 - most need nothing of their peers
        """Take note of what all ranks described, in the order of ranks; after it the transport can run.

        Raises:
            TransportUnavailable: a peer's storage can't be reached this way; says why.
        """

    def moved(self) -> bool:
        """Whether other memory has come to lie at the addresses that were bound, which needs a new ``bind``."""
        return False

    def settle(self) -> None:  # noqa: B027 - most write on streams that follow the caller's
        """Before any rank runs a refit: wait for this rank's earlier work on its storage.

        The caller lets no rank :meth:`run` before all are through here.

        Raises:
            RefitTimeout: it does not end.
        """

    def rest(self) -> None:  # noqa: B027 - most keep nothing of their peers' memory
        """No refit is under way on any rank: let go of what its owner may want back, until :meth:`moved` asks to bind anew."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Close communicators and let go of memory; safe to call twice. ``failed``: peers may be gone."""

    @abstractmethod
    def run(self, clock: StageClock, aside: Callable[[], None] | None = None) -> TransferResult:
        """Move all bulk bytes of one refit.

        Args:
            clock: of the refit.
            aside: what else this rank exchanges in the refit, called once on the caller's stream, at the same
                place in every rank's order of exchanges; while bulk bytes are on their way, where that can be.

        Raises:
            PeerLost, RefitTimeout: from the wire.
            VerificationError: landed bytes differ from the sent ones.
            Exception: what ``aside`` raises.
        """

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of the buffers that live as long as the epoch."""

    def _checked(self, ordinal: int, of: int) -> bool:
        """Whether the ``ordinal``-th of a pair's ``of`` messages is checked in this refit; sampled checks walk through.

        The refits are counted here, so that any sequence of versions comes to all messages.
        """
        return self.verify == "full" or (self.verify == "sampled" and ordinal == self._refits % of)


class GroupTransport(Transport):
    """A transport over a group of its own."""

    def __init__(self, group: Group, rank: int, verify: str):
        super().__init__(rank, verify)
        self.group = group
        self._open = [group]

    def close(self, *, failed: bool = False) -> None:
        while self._open:
            self._open.pop().close(failed=failed)


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
