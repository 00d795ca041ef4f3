"""All that a ``p2p`` refit does, prepared: buckets, copies, checksums and exchanges of every round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..comm.group import Exchange, Group, PeerBuffer
from ..packing import (
    Checksums,
    Copy,
    EncodedView,
    Encoder,
    PushedEncodings,
    make_checksums,
    make_copy,
    make_encoders,
)
from ..packing.host import PushedViews, pushed_to
from ..plan import CHECKSUM_BYTES, Pace, Segment, aligned
from .cargo import Cargo, Item
from .ledger import Ledger
from .staging import Staging, share_buckets
from .views import Held, LiveViews, flat_bytes, in_memory, packed_view, unowned

# The buckets of a rank: (direction, number) → uint8.
Buckets = dict[tuple[str, int], torch.Tensor]


class Check(NamedTuple):
    """Checksums of one round that are due in every ``of``-th refit, beginning with refit ``turn``."""

    turn: int
    of: int
    checksums: Checksums


class Replay:
    """A rank's cargo bound to its storage.

    Attributes:
        outgoing: which bucket each round is packed in.
        incoming: which bucket each round arrives in.
        buckets: the buckets themselves.
        exchanges: the wire of each round.
        packs: for each round whether there is anything to pack or to add up.
        unpacks: the same for what arrives.
        relayed_rounds: for each round those in which what it passes on arrived.
        ledger: the checksums.
        blocks: for each round whether packing may hold up the host until the device's earlier work is done.
    """

    def __init__(
        self,
        cargo: Cargo,
        views: LiveViews,
        pace: Pace,
        group: Group,
        lanes: Sequence[int],
        verify: str,
        buckets: Buckets,
    ):
        """
        Args:
            cargo: of this rank.
            views: of this rank.
            pace: of the wire.
            group: of all ranks.
            lanes: each round's lane of the group.
            verify: ``off``, ``sampled`` or ``full``.
            buckets: of an earlier binding, taken over where they are large enough.

        Raises:
            PlanError: a segment that this rank holds no fragment of.
        """
        self._views, self._group, self._verify = views, group, verify
        direct = cargo.direct(views)
        staged_out = [[i for i in items if i not in direct and i.relays is None] for items in cargo.sends]
        staged_in = [[i for i in items if i not in direct] for items in cargo.receives]
        self.outgoing = share_buckets(
            [_nbytes(items) for items in staged_out], lanes, [()] * len(lanes), pace.buckets
        )
        self.incoming = share_buckets(
            [_nbytes(items) for items in staged_in], lanes, cargo.readers, pace.buckets
        )
        self.buckets = self._make_buckets(buckets)
        self._buffers = self._lay_out("out", self.outgoing, staged_out) | self._lay_out(
            "in", self.incoming, staged_in
        )
        self.ledger = Ledger(cargo, group, on=verify != "off")
        self._pushes = [self._pushed_views(items) for items in staged_out]
        self._computed = [self._encoders(items) for items in staged_out]
        self._packs = [self._pack_copy(items) for items in staged_out]
        self._unpacks = [self._unpack_copy(items) for items in staged_in]
        own = [[i for i in items if i.relays is None] for items in cargo.sends]
        self.blocks = [
            push.nbytes > 0 or any(isinstance(encoder, PushedEncodings) for encoder in computed)
            for push, computed in zip(self._pushes, self._computed, strict=True)
        ]
        self._sent_checks = [
            self._checks(cargo, items, self.ledger.sent_rows, self._readable) for items in own
        ]
        self._landed_checks = [
            self._checks(cargo, items, self.ledger.landed_rows, self._landing) for items in cargo.receives
        ]
        self._turns = [(i.message.payload_bytes, cargo.turns[i]) for items in cargo.receives for i in items]
        self.packs = [bool(items) for items in own]
        self.unpacks = [bool(items) for items in cargo.receives]
        self.relayed_rounds = [
            sorted({i.relays.place for i in items if i.relays is not None}) for items in cargo.sends
        ]
        self.exchanges: list[Exchange] = [
            group.prepare(
                [PeerBuffer(i.message.destination, self._buffer(i.relays or i)) for i in sends],
                [PeerBuffer(i.message.source, self._buffer(i)) for i in receives],
                lane,
            )
            for sends, receives, lane in zip(cargo.sends, cargo.receives, lanes, strict=True)
        ]
        # From here on plain addresses on a GPU: views would keep the memory of parameters that are offloaded meanwhile.
        self._views = LiveViews([])

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.numel() for bucket in self.buckets.values())

    def pack(self, index: int, refit: int) -> None:
        """Fill a round's bucket, with the checksums that are due in refit number ``refit``."""
        # What the host pushes or what is computed is added up in the bucket, and the copies carry the checksums into the
        # messages.
        self._pushes[index].launch()
        for encoder in self._computed[index]:
            encoder.launch()
        for turn, of, checksums in self._sent_checks[index]:
            if refit % of == turn:
                checksums.add_to(self.ledger.sent)
        self._packs[index].launch()

    def unpack(self, index: int, refit: int) -> None:
        """Empty a round's bucket into live storage, and add up what landed there."""
        self._unpacks[index].launch()
        for turn, of, checksums in self._landed_checks[index]:
            if refit % of == turn:
                checksums.add_to(self.ledger.landed)

    def drop(self) -> None:
        """After a failure: forget what is under way."""
        for exchange in (*self.exchanges, self.ledger.tell):
            exchange.drop()

    def verified_bytes(self, refit: int) -> int:
        """Bytes that are compared in refit number ``refit``."""
        if self._verify == "off":
            return 0
        return sum(n for n, (turn, of) in self._turns if self._verify == "full" or refit % of == turn)

    def _make_buckets(self, old: Buckets) -> Buckets:
        made: Buckets = {}
        for direction, staging in (("out", self.outgoing), ("in", self.incoming)):
            for number, nbytes in enumerate(staging.nbytes):
                bucket = old.pop((direction, number), None)
                if bucket is None or bucket.numel() < nbytes:
                    bucket = torch.zeros(nbytes, dtype=torch.uint8, device=self._group.device)
                made[direction, number] = bucket
        return made

    def _lay_out(
        self, direction: str, staging: Staging, rounds: Sequence[Sequence[Item]]
    ) -> dict[Item, torch.Tensor]:
        """Each staged message's bytes, one after another in its round's bucket."""
        found: dict[Item, torch.Tensor] = {}
        for number, items in zip(staging.bucket_of, rounds, strict=True):
            cursor = 0
            for item in items:
                end = cursor + item.message.nbytes
                found[item] = self.buckets[direction, number][cursor:end]
                cursor = aligned(end)
        return found

    def _buffer(self, item: Item) -> torch.Tensor:
        """What the wire carries for an item: its part of a bucket, or the live storage itself."""
        if item in self._buffers:
            return self._buffers[item]
        return unowned(flat_bytes(in_memory(self._views.of(item.message.segments[0]))))

    def _pushed_views(self, items: Sequence[Item]) -> PushedViews:
        return PushedViews([pair for pair in self._plain(items) if pushed_to(self._group.device, pair[0])])

    def _encoders(self, items: Sequence[Item]) -> list[Encoder]:
        pairs = [pair for item in items for pair in self._segments(item)]
        encoded = [(live, packed) for live, packed in pairs if isinstance(live, EncodedView)]
        return make_encoders(encoded, self._group.device)

    def _pack_copy(self, items: Sequence[Item]) -> Copy:
        pairs = [pair for pair in self._plain(items) if not pushed_to(self._group.device, pair[0])]
        rows = self.ledger.sent_rows
        pairs += [(self.ledger.sent[rows[item]], self._slot(item)) for item in self._framed(items)]
        return make_copy(pairs, self._group.device)

    def _plain(self, items: Sequence[Item]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of what is packed that which lies in memory."""
        pairs = [pair for item in items for pair in self._segments(item)]
        return [(live, packed) for live, packed in pairs if isinstance(live, torch.Tensor)]

    def _unpack_copy(self, items: Sequence[Item]) -> Copy:
        pairs = [(packed, in_memory(live)) for item in items for live, packed in self._segments(item)]
        rows = self.ledger.landed_rows
        pairs += [(self._slot(item), self.ledger.told[rows[item]]) for item in self._framed(items)]
        return make_copy(pairs, self._group.device)

    def _segments(self, item: Item) -> list[tuple[Held, torch.Tensor]]:
        buffer = self._buffers[item]
        found = []
        for segment in item.message.segments:
            live = self._views.of(segment)
            found.append((live, packed_view(buffer, segment, live.dtype)))
        return found

    def _framed(self, items: Sequence[Item]) -> list[Item]:
        """Items whose messages carry checksums."""
        return [item for item in items if self._verify != "off" and not item.message.is_bare]

    def _slot(self, item: Item) -> torch.Tensor:
        return self._buffers[item][-CHECKSUM_BYTES:].view(torch.int64)

    def _readable(self, item: Item, segment: Segment) -> torch.Tensor:
        """A segment to be sent where the device can read it: live, or in its bucket if it is pushed or computed there."""
        live = self._views.of(segment)
        if isinstance(live, EncodedView) or (item in self._buffers and pushed_to(self._group.device, live)):
            return packed_view(self._buffers[item], segment, live.dtype)
        return live

    def _landing(self, _: Item, segment: Segment) -> torch.Tensor:
        return in_memory(self._views.of(segment))

    def _checks(
        self,
        cargo: Cargo,
        items: Sequence[Item],
        rows: Mapping[Item, int],
        view: Callable[[Item, Segment], torch.Tensor],
    ) -> list[Check]:
        """The checksums of one round's items, together where they are due in the same refits."""
        if self._verify == "off":
            return []
        due: dict[tuple[int, int], list[Item]] = defaultdict(list)
        for item in items:
            due[cargo.turns[item] if self._verify == "sampled" else (0, 1)].append(item)
        checks = []
        for (turn, of), together in sorted(due.items(), key=lambda entry: entry[0]):
            views = [(view(item, s), s.offset) for item in together for s in item.message.segments]
            slots = [rows[item] for item in together for _ in item.message.segments]
            checks.append(Check(turn, of, make_checksums(views, self._group.device, slots)))
        return checks


def _nbytes(items: Sequence[Item]) -> int:
    return sum(aligned(item.message.nbytes) for item in items)
