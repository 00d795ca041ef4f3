"""The checksums of one refit: of what a rank sent, of what its peers say they sent to it, and of what landed.

Each begins with its message's *tag*, which both ends derive from the plan and the refit's number. A message
that arrives in another's place, or once more from an earlier refit, so shows even where its bytes agree with the
checksum that they carry, and even where its turn to be checked has not come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch

from ..comm.group import Exchange, Group, PeerBuffer
from ..layout import flat_bytes
from ..packing import Checksums, make_checksums
from ..plan import Segment
from .messages import LocalMessage, LocalMessages

# Added to every tag from refit to refit: an odd number, so that none comes again within 2^64 refits.
_STEP = 0x9E3779B97F4A7C15
_WORD = 1 << 64


class Check(NamedTuple):
    """Checksums that are due in every ``of``-th refit, beginning with refit ``turn``."""

    turn: int
    of: int
    checksums: Checksums


def add_due(checks: Iterable[Check], refit: int, sums: torch.Tensor) -> None:
    """Add the checksums that are due in refit number ``refit`` to rows of :class:`ChecksumRows`."""
    for turn, of, checksums in checks:
        if refit % of == turn:
            checksums.add_to(sums)


class ChecksumRows:
    """Rows of checksums, one for each message; only its tag where it is not checked in this refit.

    The checksums of framed messages travel in them; those of bare ones, or of all, lie together for each peer and travel
    after all rounds.

    Attributes:
        sent: int64 ``[n, 2]``, of the messages that this rank packs.
        expected: int64 ``[m, 2]``, of those that it receives, as their origins computed them.
        landed: int64 ``[m, 2]``, as read back from this rank's storage.
        sent_rows: row in ``sent`` of each message.
        landed_rows: row in ``expected`` and ``landed`` of each message.
        exchange: that of the checksums that travel by themselves, after all rounds.
    """

    def __init__(self, messages: LocalMessages, group: Group, verify: str, *, all_apart: bool = False):
        """
        Args:
            messages: of this rank.
            group: of all ranks.
            verify: ``off``, ``sampled`` or ``full``.
            all_apart: no checksum travels in its message.
        """
        self._on, self._verify = verify != "off", verify
        self._device = device = group.device
        self._turns = messages.turns
        self._apart: Callable[[LocalMessage], bool] = (
            (lambda one: True) if all_apart else (lambda one: one.message.is_bare)
        )
        on = self._on
        own = [one for sent in messages.sends for one in sent if one.relay_of is None]
        self.sent_rows = self._rows(own, messages.outgoing)
        received = [one for held in messages.receives for one in held]
        self.landed_rows = self._rows(received, messages.incoming)
        self._received = [(one.message.payload_bytes, messages.turns[one]) for one in received]
        self._sent_tags = _tags(self.sent_rows, device)
        self._landed_tags = _tags(self.landed_rows, device)
        self.sent = torch.zeros(len(self.sent_rows), 2, dtype=torch.int64, device=device)
        self.expected = torch.zeros(len(self.landed_rows), 2, dtype=torch.int64, device=device)
        self.landed = torch.zeros_like(self.expected)
        self._differs = torch.zeros(self.expected.shape, dtype=torch.bool, device=device)
        self._differs_on_host = torch.zeros(
            self.expected.shape, dtype=torch.bool, pin_memory=device.type == "cuda"
        )
        self.exchange: Exchange = group.prepare(
            self._parcels(messages.outgoing, self.sent, self.sent_rows) if on else [],
            self._parcels(messages.incoming, self.expected, self.landed_rows) if on else [],
        )

    @property
    def memory(self) -> list[object]:
        """All that kernels use, but for the exchange."""
        tags = [self._sent_tags, self._landed_tags]
        return [*tags, self.sent, self.expected, self.landed, self._differs, self._differs_on_host]

    def begin_sent(self, refit: int) -> None:
        """Set ``sent`` to the tags of refit number ``refit``; enqueued on the current stream of a GPU.

        Both ends count alike, from a number of the epoch's own: what an earlier epoch sent has other tags, too.
        """
        if self._on:
            torch.add(self._sent_tags, _signed(refit * _STEP), out=self.sent)

    def begin_landed(self, refit: int) -> None:
        """The same for ``landed``."""
        if self._on:
            torch.add(self._landed_tags, _signed(refit * _STEP), out=self.landed)

    def compare(self) -> None:
        """Compare what was expected with what landed; enqueued on the current stream of a GPU."""
        if self._on:
            torch.ne(self.expected, self.landed, out=self._differs)
            self._differs_on_host.copy_(self._differs, non_blocking=True)

    def damaged(self) -> list[LocalMessage]:
        """Messages whose checksums differ; after the comparison is done."""
        if not bool(self._differs_on_host.any()):
            return []
        messages = {row: one for one, row in self.landed_rows.items()}
        return [messages[row] for row in self._differs_on_host.any(dim=1).nonzero().flatten().tolist()]

    def checks(
        self,
        segments: Iterable[tuple[LocalMessage, Segment]],
        rows: Mapping[LocalMessage, int],
        view: Callable[[LocalMessage, Segment], torch.Tensor],
    ) -> list[Check]:
        """What segments add to their messages' checksums, together where they are due in the same refits.

        Args:
            segments: of this rank, with their messages.
            rows: ``sent_rows`` or ``landed_rows``.
            view: where the device reads a segment.
        """
        if not self._on:
            return []
        due: dict[tuple[int, int], list[tuple[LocalMessage, Segment]]] = defaultdict(list)
        for one, segment in segments:
            due[self._turns[one] if self._verify == "sampled" else (0, 1)].append((one, segment))
        return [
            Check(
                *turn,
                make_checksums(
                    [(view(one, segment), segment.offset) for one, segment in together],
                    self._device,
                    [rows[one] for one, _ in together],
                ),
            )
            for turn, together in sorted(due.items(), key=lambda entry: entry[0])
        ]

    def verified_bytes(self, refit: int) -> int:
        """Bytes of this rank's received messages that are compared in refit number ``refit``."""
        if not self._on:
            return 0
        return sum(n for n, (turn, of) in self._received if self._verify == "full" or refit % of == turn)

    def _rows(
        self, messages: Sequence[LocalMessage], pairs: Mapping[int, Sequence[LocalMessage]]
    ) -> dict[LocalMessage, int]:
        ordered = [one for one in messages if not self._apart(one)]
        ordered += [one for peer in sorted(pairs) for one in pairs[peer] if self._apart(one)]
        return {one: row for row, one in enumerate(ordered)}

    def _parcels(
        self,
        pairs: Mapping[int, Sequence[LocalMessage]],
        sums: torch.Tensor,
        rows: Mapping[LocalMessage, int],
    ) -> list[PeerBuffer]:
        parcels = []
        for peer in sorted(pairs):
            found = [rows[one] for one in pairs[peer] if self._apart(one)]
            if found:
                parcels.append(PeerBuffer(peer, flat_bytes(sums[found[0] : found[-1] + 1])))
        return parcels


def _tags(rows: Mapping[LocalMessage, int], device: torch.device) -> torch.Tensor:
    """Each row's tag, int64 ``[n, 2]``.

    A relay carries the checksum that the origin gave to its first destination, which passes it on in the round
    after.
    """
    found = []
    for one in sorted(rows, key=rows.__getitem__):
        message = one.message
        first = message.source if message.is_relay else message.destination
        text = f"{message.origin} {first} {message.round_index & ~1}"
        found.append(np.frombuffer(sha256(text.encode()).digest(), dtype="<i8", count=2))
    return torch.from_numpy(np.array(found, dtype=np.int64).reshape(-1, 2)).to(device)


def _signed(value: int) -> int:
    """``value`` modulo 2^64 as the int64 with the same bits."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value
