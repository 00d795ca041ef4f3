"""The checksums of one refit: of what a rank sent, of what it was told was sent to it, and of what landed.

Each begins with its message's *mark*, which both ends derive from the plan and the refit's number. A message
that arrives in another's place, or once more from an earlier refit, so shows even where its bytes agree with the
checksum that they carry, and even where its turn to be checked has not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import torch

from ..comm.group import Exchange, Group, PeerBuffer
from .cargo import Cargo, Item
from .views import flat_bytes

# Added to every mark from refit to refit: an odd number, so that none comes again within 2^64 refits.
_STEP = 0x9E3779B97F4A7C15
_WORD = 1 << 64


class Ledger:
    """Rows of checksums, one for each message; only its mark where it is not checked in this refit.

    The checksums of framed messages travel in them; those of bare ones lie in one piece for each peer and travel
    after all rounds.

    Attributes:
        sent: int64 ``[n, 2]``, of the messages that this rank packs.
        told: int64 ``[m, 2]``, of those that it receives, as their origins computed them.
        landed: int64 ``[m, 2]``, as read back from this rank's storage.
        sent_rows: row in ``sent`` of each item.
        landed_rows: row in ``told`` and ``landed`` of each item.
        tell: the exchange after all rounds.
    """

    def __init__(self, cargo: Cargo, group: Group, on: bool):
        """
        Args:
            cargo: of this rank.
            group: of all ranks.
            on: whether anything is ever checked.
        """
        self._on = on
        device = group.device
        own = [item for items in cargo.sends for item in items if item.relays is None]
        self.sent_rows = _rows(own, cargo.outgoing)
        received = [item for items in cargo.receives for item in items]
        self.landed_rows = _rows(received, cargo.incoming)
        self._sent_marks = _marks(self.sent_rows, device)
        self._landed_marks = _marks(self.landed_rows, device)
        self.sent = torch.zeros(len(self.sent_rows), 2, dtype=torch.int64, device=device)
        self.told = torch.zeros(len(self.landed_rows), 2, dtype=torch.int64, device=device)
        self.landed = torch.zeros_like(self.told)
        self._differs = torch.zeros(self.told.shape, dtype=torch.bool, device=device)
        self._differs_on_host = torch.zeros(
            self.told.shape, dtype=torch.bool, pin_memory=device.type == "cuda"
        )
        self.tell: Exchange = group.prepare(
            _parcels(cargo.outgoing, self.sent, self.sent_rows) if on else [],
            _parcels(cargo.incoming, self.told, self.landed_rows) if on else [],
        )

    def begin_sent(self, refit: int) -> None:
        """Set ``sent`` to the marks of refit number ``refit``; enqueued on the current stream of a GPU.

        Both ends count alike, from a number of the epoch's own: what an earlier epoch sent has other marks, too.
        """
        if self._on:
            torch.add(self._sent_marks, _signed(refit * _STEP), out=self.sent)

    def begin_landed(self, refit: int) -> None:
        """The same for ``landed``."""
        if self._on:
            torch.add(self._landed_marks, _signed(refit * _STEP), out=self.landed)

    def compare(self) -> None:
        """Compare what was told with what landed; enqueued on the current stream of a GPU."""
        if self._on:
            torch.ne(self.told, self.landed, out=self._differs)
            self._differs_on_host.copy_(self._differs, non_blocking=True)

    def damaged(self) -> list[Item]:
        """Items whose checksums differ; after the comparison is done."""
        if not bool(self._differs_on_host.any()):
            return []
        items = {row: item for item, row in self.landed_rows.items()}
        return [items[row] for row in self._differs_on_host.any(dim=1).nonzero().flatten().tolist()]


def _rows(items: Sequence[Item], pairs: Mapping[int, Sequence[Item]]) -> dict[Item, int]:
    ordered = [item for item in items if not item.message.is_bare]
    ordered += [item for peer in sorted(pairs) for item in pairs[peer] if item.message.is_bare]
    return {item: row for row, item in enumerate(ordered)}


def _marks(rows: Mapping[Item, int], device: torch.device) -> torch.Tensor:
    """Each row's mark, int64 ``[n, 2]``.

    A relay carries the checksum that the origin gave to its first destination, which passes it on in the round
    after.
    """
    found = []
    for item in sorted(rows, key=rows.__getitem__):
        message = item.message
        first = message.source if message.is_relay else message.destination
        text = f"{message.origin} {first} {message.round_index & ~1}"
        found.append(np.frombuffer(sha256(text.encode()).digest(), dtype="<i8", count=2))
    return torch.from_numpy(np.array(found, dtype=np.int64).reshape(-1, 2)).to(device)


def _signed(value: int) -> int:
    """``value`` modulo 2^64 as the int64 with the same bits."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


def _parcels(
    pairs: Mapping[int, Sequence[Item]], sums: torch.Tensor, rows: Mapping[Item, int]
) -> list[PeerBuffer]:
    parcels = []
    for peer in sorted(pairs):
        found = [rows[item] for item in pairs[peer] if item.message.is_bare]
        if found:
            parcels.append(PeerBuffer(peer, flat_bytes(sums[found[0] : found[-1] + 1])))
    return parcels
