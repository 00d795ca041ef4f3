"""Where the messages land that a rank receives, and whether what has landed there is what was sent."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from ...plan import Message
from ...records.clock import StageClock
from ..base import damaged
from ..storage import LiveViews, Place
from .checksums import BoundMessage, MessageChecksums, no_checksums
from .signals import SignalBuffer, checksums_landed
from .views import bind_messages
from .waits import Waits


class Landing:
    """The messages that a rank receives.

    Attributes:
        bound: each sender's, bound to where they land.
    """

    def __init__(
        self,
        rank: int,
        messages: Mapping[int, Sequence[Message]],
        verify: str,
        device: torch.device,
        waits: Waits,
        *,
        in_portions: bool,
    ):
        """Nothing is bound yet.

        Args:
            rank: of the refit world.
            messages: of each sender, in the order of the plan.
            verify: ``off``, ``sampled`` or ``full``.
            device: of the parameters.
            waits: of this rank.
            in_portions: whether checksums are to be added up by portion.
        """
        self._rank = rank
        self._messages = messages
        self._verify = verify
        self._device = device
        self._waits = waits
        self._in_portions = in_portions
        self.bound: dict[int, list[BoundMessage]] = {}
        # Where those lay to which it was bound last.
        self._places: tuple[Place, ...] | None = None
        self._checksums = no_checksums()
        # Which sums differ from the sender's: on the device, and on the host.
        self._differ: torch.Tensor | None = None
        self._damage: torch.Tensor | None = None
        # Bytes that were added up of the refit under way.
        self._covered = 0

    def bind(self, views: LiveViews, places: tuple[Place, ...], *, ahead: bool) -> None:
        """Look up where messages land, and prepare their checksums, unless they land where they did.

        Args:
            views: of this rank's fragments.
            places: where those lie.
            ahead: as of :class:`~.checksums.MessageChecksums`.
        """
        if places == self._places:
            return
        # Before new ones are made beside them.
        self._checksums, self._places = no_checksums(), None
        self.bound = bind_messages(self._messages, views)
        self._checksums = MessageChecksums(
            self.bound, self._verify, self._device, ahead=ahead, in_portions=self._in_portions
        )
        if self._differ is None:
            self._differ = torch.zeros_like(self._checksums.sums, dtype=torch.bool)
            self._damage = torch.zeros(self._differ.shape, dtype=torch.bool).pin_memory()
        self._places = places

    def prepare(self, number: int) -> None:
        """As :meth:`~.checksums.MessageChecksums.prepare`."""
        self._checksums.prepare(number)

    def add_up(self, number: int, portions: Container[int]) -> None:
        """Enqueue the checksums of portions that have landed, as :meth:`~.checksums.MessageChecksums.compute` does."""
        if 0 in portions:
            self._covered = 0
        self._covered += self._checksums.compute(number, portions)

    def compare(self, refit: int, signals: SignalBuffer, ended: torch.cuda.Event, clock: StageClock) -> int:
        """Compare what landed, and was added up, with the senders' checksums.

        Args:
            refit: counted from 1, for signals.
            signals: with the senders' checksums.
            ended: recorded after all that is enqueued here.
            clock: of the refit.

        Returns:
            The bytes that were compared.

        Raises:
            VerificationError: some are not what was sent.
            RefitTimeout, RefitError: as :meth:`~.waits.Waits.until`.
        """
        assert self._differ is not None, "bind comes before compare"
        assert self._damage is not None, "made with the other"
        with clock.waiting():
            self._waits.for_signals(signals, checksums_landed(refit), "verify")
        # A look that found the last signal may have found older checksums before it.
        signals.fetch()
        torch.ne(self._checksums.sums, signals.checksums, out=self._differ)
        self._damage.copy_(self._differ, non_blocking=True)
        ended.record(torch.cuda.current_stream(self._device))
        with clock.waiting():
            self._waits.until(ended.query, "verify", lambda: "this rank's checksums")
        for message, differs in zip(self._checksums.messages, self._damage.any(1).tolist(), strict=True):
            if differs:
                raise damaged(message, self._rank)
        return self._covered
