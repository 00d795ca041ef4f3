"""A rank's part of the plan bound to its storage: all that a ``p2p`` refit does, prepared round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.group import Exchange, Group, PeerBuffer
from ..layout import flat_bytes
from ..packing import (
    Copy,
    EncodedView,
    Encoder,
    EncodingsByHost,
    make_copy,
    make_encoders,
)
from ..packing.host import CopiesByHost, copied_by_host
from ..plan import CHECKSUM_BYTES, Pace, Segment, aligned
from .checksums import Check, ChecksumRows, add_due
from .messages import LocalMessage, LocalMessages
from .storage import LiveView, LiveViews, in_memory, packed_view, unowned

# The buckets of a rank: (direction, number) → uint8.
Buckets = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class Round:
    """What this rank does in one of its rounds.

    Attributes:
        exchange: the wire.
        packs: whether there is anything to pack or to add up.
        unpacks: the same for what arrives.
        pack_blocks: whether packing may hold up the host until the device's earlier work is done.
        pack_after: the round that used the outgoing bucket before, or -1.
        receive_after: the round that used the incoming bucket before, or -1.
        relayed_from: the rounds in which what this one passes on arrived.
        readers: the later rounds that pass on what arrives in this one.
        by_host: host memory that the device can't read, copied to the outgoing bucket by the host.
        encoders: what is encoded into the outgoing bucket.
        packed: all other copies into the outgoing bucket.
        unpacked: copies from the incoming bucket to the parameters.
        sent_checks: checksums of what is sent.
        landed_checks: checksums of what landed, read back from the parameters.
    """

    exchange: Exchange
    packs: bool
    unpacks: bool
    pack_blocks: bool
    pack_after: int
    receive_after: int
    relayed_from: list[int]
    readers: list[int]
    by_host: CopiesByHost
    encoders: list[Encoder]
    packed: Copy
    unpacked: Copy
    sent_checks: list[Check]
    landed_checks: list[Check]


class BoundPlan:
    """A rank's messages bound to its storage.

    Attributes:
        rounds: of this rank, in order.
        outgoing: which bucket each round is packed in.
        incoming: which bucket each round arrives in.
        buckets: the buckets themselves.
        checksums: of all messages.
    """

    def __init__(
        self,
        messages: LocalMessages,
        views: LiveViews,
        pace: Pace,
        group: Group,
        lanes: Sequence[int],
        verify: str,
        buckets: Buckets,
    ):
        """
        Args:
            messages: of this rank.
            views: of this rank.
            pace: of the wire.
            group: of all ranks.
            lanes: each round's lane of the group.
            verify: ``off``, ``sampled`` or ``full``.
            buckets: of an earlier binding, reused where they are large enough.

        Raises:
            PlanError: a segment that this rank holds no fragment of.
        """
        self._messages, self._views, self._group, self._verify = messages, views, group, verify
        # What travels straight from or to the parameters needs no bucket, and what is relayed leaves from the bucket in
        # which it arrived.
        direct = messages.direct(views)
        self._staged_out = [
            [m for m in ms if m not in direct and m.relay_of is None] for ms in messages.sends
        ]
        self._staged_in = [[m for m in ms if m not in direct] for ms in messages.receives]
        nobody: list[Sequence[int]] = [()] * len(lanes)
        self.outgoing = share_buckets([_nbytes(ms) for ms in self._staged_out], lanes, nobody, pace.buckets)
        self.incoming = share_buckets(
            [_nbytes(ms) for ms in self._staged_in], lanes, messages.readers, pace.buckets
        )
        self.buckets = self._make_buckets(buckets)
        self._buffers = self._lay_out("out", self.outgoing, self._staged_out)
        self._buffers |= self._lay_out("in", self.incoming, self._staged_in)
        self.checksums = ChecksumRows(messages, group, verify)
        self.rounds = [self._bind_round(index, lane) for index, lane in enumerate(lanes)]
        # From here on plain addresses on a GPU: views would keep the memory of parameters that are offloaded meanwhile.
        self._views = LiveViews([])

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.numel() for bucket in self.buckets.values())

    @property
    def memory(self) -> list[object]:
        """All that kernels use which a refit enqueues, but for the exchanges."""
        prepared = [
            (one.encoders, one.packed, one.unpacked, one.sent_checks, one.landed_checks)
            for one in self.rounds
        ]
        return [self.buckets, self.checksums.memory, prepared]

    def pack(self, index: int, refit: int) -> None:
        """Fill a round's bucket, with the checksums that are due in refit number ``refit``."""
        one = self.rounds[index]
        # What the host copies or what is encoded is added up in the bucket, so it comes first; the copies come last, since
        # they carry the checksums into the messages.
        one.by_host.launch()
        for encoder in one.encoders:
            encoder.launch()
        add_due(one.sent_checks, refit, self.checksums.sent)
        one.packed.launch()

    def unpack(self, index: int, refit: int) -> None:
        """Empty a round's bucket into live storage, and add up what landed there."""
        one = self.rounds[index]
        one.unpacked.launch()
        add_due(one.landed_checks, refit, self.checksums.landed)

    def drop(self) -> None:
        """After a failure: forget what is under way."""
        for exchange in (*(one.exchange for one in self.rounds), self.checksums.exchange):
            exchange.drop()

    def verified_bytes(self, refit: int) -> int:
        """Bytes that are compared in refit number ``refit``."""
        return self.checksums.verified_bytes(refit)

    def _bind_round(self, index: int, lane: int) -> Round:
        messages, rows = self._messages, self.checksums
        sends, receives = messages.sends[index], messages.receives[index]
        staged_out, staged_in = self._staged_out[index], self._staged_in[index]
        own = [m for m in sends if m.relay_of is None]
        by_host = self._copies_by_host(staged_out)
        encoders = self._encoders(staged_out)
        return Round(
            exchange=self._group.prepare(
                [PeerBuffer(m.message.destination, self._buffer(m.relay_of or m)) for m in sends],
                [PeerBuffer(m.message.source, self._buffer(m)) for m in receives],
                lane,
            ),
            packs=bool(own),
            unpacks=bool(receives),
            pack_blocks=by_host.nbytes > 0 or any(isinstance(one, EncodingsByHost) for one in encoders),
            pack_after=self.outgoing.before[index],
            receive_after=self.incoming.before[index],
            relayed_from=sorted({m.relay_of.index for m in sends if m.relay_of is not None}),
            readers=messages.readers[index],
            by_host=by_host,
            encoders=encoders,
            packed=self._pack_copy(staged_out),
            unpacked=self._unpack_copy(staged_in),
            sent_checks=rows.checks(_segments_of(own), rows.sent_rows, self._readable),
            landed_checks=rows.checks(_segments_of(receives), rows.landed_rows, self._landing),
        )

    def _make_buckets(self, old: Buckets) -> Buckets:
        made: Buckets = {}
        for direction, sharing in (("out", self.outgoing), ("in", self.incoming)):
            for number, nbytes in enumerate(sharing.nbytes):
                bucket = old.pop((direction, number), None)
                if bucket is None or bucket.numel() < nbytes:
                    bucket = torch.zeros(nbytes, dtype=torch.uint8, device=self._group.device)
                made[direction, number] = bucket
        return made

    def _lay_out(
        self, direction: str, sharing: _BucketSharing, rounds: Sequence[Sequence[LocalMessage]]
    ) -> dict[LocalMessage, torch.Tensor]:
        """Each staged message's bytes, one after another in its round's bucket."""
        found: dict[LocalMessage, torch.Tensor] = {}
        for number, messages in zip(sharing.bucket_of, rounds, strict=True):
            cursor = 0
            for one in messages:
                end = cursor + one.message.nbytes
                found[one] = self.buckets[direction, number][cursor:end]
                cursor = aligned(end)
        return found

    def _buffer(self, one: LocalMessage) -> torch.Tensor:
        """What the wire carries for a message: its part of a bucket, or the live storage itself."""
        if one in self._buffers:
            return self._buffers[one]
        return unowned(flat_bytes(in_memory(self._views.of(one.message.segments[0]))))

    def _copies_by_host(self, messages: Sequence[LocalMessage]) -> CopiesByHost:
        return CopiesByHost(
            [pair for pair in self._plain(messages) if copied_by_host(self._group.device, pair[0])]
        )

    def _encoders(self, messages: Sequence[LocalMessage]) -> list[Encoder]:
        pairs = [pair for one in messages for pair in self._segments(one)]
        encoded = [(live, packed) for live, packed in pairs if isinstance(live, EncodedView)]
        return make_encoders(encoded, self._group.device)

    def _pack_copy(self, messages: Sequence[LocalMessage]) -> Copy:
        pairs = [pair for pair in self._plain(messages) if not copied_by_host(self._group.device, pair[0])]
        rows = self.checksums.sent_rows
        pairs += [
            (self.checksums.sent[rows[one]], self._checksum_slot(one)) for one in self._framed(messages)
        ]
        return make_copy(pairs, self._group.device)

    def _plain(self, messages: Sequence[LocalMessage]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of what is packed that which lies in memory."""
        pairs = [pair for one in messages for pair in self._segments(one)]
        return [(live, packed) for live, packed in pairs if isinstance(live, torch.Tensor)]

    def _unpack_copy(self, messages: Sequence[LocalMessage]) -> Copy:
        pairs = [(packed, in_memory(live)) for one in messages for live, packed in self._segments(one)]
        rows = self.checksums.landed_rows
        pairs += [
            (self._checksum_slot(one), self.checksums.expected[rows[one]]) for one in self._framed(messages)
        ]
        return make_copy(pairs, self._group.device)

    def _segments(self, one: LocalMessage) -> list[tuple[LiveView, torch.Tensor]]:
        buffer = self._buffers[one]
        found = []
        for segment in one.message.segments:
            live = self._views.of(segment)
            found.append((live, packed_view(buffer, segment, live.dtype)))
        return found

    def _framed(self, messages: Sequence[LocalMessage]) -> list[LocalMessage]:
        """Those that carry checksums."""
        return [one for one in messages if self._verify != "off" and not one.message.is_bare]

    def _checksum_slot(self, one: LocalMessage) -> torch.Tensor:
        return self._buffers[one][-CHECKSUM_BYTES:].view(torch.int64)

    def _readable(self, one: LocalMessage, segment: Segment) -> torch.Tensor:
        """A segment to be sent where the device can read it: live, or in its bucket if it is copied there by the host or encoded."""
        live = self._views.of(segment)
        if isinstance(live, EncodedView) or (
            one in self._buffers and copied_by_host(self._group.device, live)
        ):
            return packed_view(self._buffers[one], segment, live.dtype)
        return live

    def _landing(self, _: LocalMessage, segment: Segment) -> torch.Tensor:
        return in_memory(self._views.of(segment))


def _segments_of(messages: Sequence[LocalMessage]) -> list[tuple[LocalMessage, Segment]]:
    return [(one, segment) for one in messages for segment in one.message.segments]


@dataclass(frozen=True)
class _BucketSharing:
    """Which bucket each round uses in one direction.

    Attributes:
        bucket_of: for each round its bucket, or -1 if it stages nothing.
        nbytes: size of each bucket.
        before: for each round the round that used its bucket last, or -1.
    """

    bucket_of: tuple[int, ...]
    nbytes: tuple[int, ...]
    before: tuple[int, ...]


def share_buckets(
    needs: Sequence[int], lanes: Sequence[int], readers: Sequence[Sequence[int]], turns: int
) -> _BucketSharing:
    """Give rounds their buckets.

    In each lane a bucket is used again ``turns`` rounds later, so that one is filled while others are on the
    wire; where a later round than that still reads a bucket, the lane gets one more.

    Args:
        needs: bytes that each round stages.
        lanes: each round's lane.
        readers: for each round the later rounds that pass on what it staged.
        turns: buckets of a lane that take turns, 2 at least.
    """
    staged = [index for index, need in enumerate(needs) if need]
    place = {
        index: sum(lanes[other] == lanes[index] for other in staged[:count])
        for count, index in enumerate(staged)
    }
    bucket_of, before = [-1] * len(needs), [-1] * len(needs)
    sizes: list[int] = []
    users: list[int] = []
    for index in staged:
        free = [
            bucket
            for bucket, user in enumerate(users)
            if lanes[user] == lanes[index]
            and place[user] <= place[index] - turns
            and all(reader < index for reader in readers[user])
        ]
        if free:
            bucket = min(free, key=users.__getitem__)
            before[index] = users[bucket]
        else:
            bucket = len(sizes)
            sizes.append(0)
            users.append(index)
        sizes[bucket] = max(sizes[bucket], needs[index])
        users[bucket] = index
        bucket_of[index] = bucket
    return _BucketSharing(tuple(bucket_of), tuple(sizes), tuple(before))


def _nbytes(messages: Sequence[LocalMessage]) -> int:
    return sum(aligned(one.message.nbytes) for one in messages)
