"""Delta refits: only what differs from the version that both sides hold travels, from shard to live parameter.

A sender keeps a *base*, what it last sent. In each refit it compares its weights with the base, packs what differs
(:mod:`.blocks`) and brings the base up to it; the receiver writes it to its live weights. In place of a base it may keep a *mask*
of what recorded steps have changed, and the weight sum that they have left (:mod:`.mask`); then it packs what is marked, and adds up
some of its weights anew. A stream is packed in several passes, each over one section or more: while one is packed, the one before is
on the wire and the one before that is written. The size of a pass's blocks is known once it is packed, so it travels ahead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..comm.group import Exchange, Group, PeerBuffer
from ..errors import RefitError, RefitMismatch, TransportUnavailable, VerificationError, end_all
from ..layout import Fragment
from ..packing import NotComputable
from ..packing.host import copied_by_host
from ..plan import Plan
from ..records.clock import StageClock
from ..transport.base import TransferResult
from ..transport.storage import LiveViews, Place
from ..transport.streams import Event, drain, make_event, make_stream, working_on
from .applier import Applier, make_appliers
from .blocks import ENTRY_BYTES, Counts, Damaged, Header
from .mask import Mask, StepRecorder, make_recorders
from .packer import LEAST_ROOM, Base, Packer, Room, make_packers
from .streams import Part, Stream, received, sent

logger = logging.getLogger(__name__)

# A section has so many times the bytes that there is room for; blocks that find none are packed in a further pass. A refit is
# slower than a dense one where more than some 15% have to travel.
_ROOM_SHARE = 5
# A block's place in the data is told in 30 bits, in units of 4 bytes.
_MOST_ROOM = 1 << 31
# Passes that are packed or on the wire at a time.
_SLOTS = 2
# Where little has changed, several sections are packed in one pass, since each pass has to be told to the receivers first. So many
# passes remain at least, so that one is packed while the one before travels; and so much of the room is left to what has changed more
# than in the last refit.
_LEAST_PASSES = 4
_FILLED = 0.5
# Refits within which ``verify: sampled`` reads all weights that are sent by a mask.
SAMPLED_WITHIN = 8


@dataclass(eq=False)
class _Outgoing:
    """A stream that this rank sends, to all ranks that get it."""

    stream: Stream
    receivers: list[int]
    sections: list[tuple[Part, ...]] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)
    base: Base | Mask | None = None
    packer: Packer | None = None
    # Of the refit under way: sections to pack, pass by pass, and what was packed into each slot.
    queue: deque[Sequence[int]] = field(default_factory=deque)
    packed: dict[int, Sequence[int]] = field(default_factory=dict)
    changed: int = 0
    sent_bytes: int = 0
    ended: bool = False
    # Of the last refit: bytes of blocks for each byte of the stream.
    density: float | None = None

    def passes(self) -> Iterator[tuple[int, ...]]:
        """Sections of elements of one size that are likely to find room together: one by one in the first refit."""
        if self.density is None:
            most = 0.0
        else:
            room = _FILLED * self.rooms[0].data.numel()
            most = min(room / max(self.density, 1e-9), self.stream.nbytes / _LEAST_PASSES)
        found: list[int] = []
        held = 0
        for number, parts in enumerate(self.sections):
            nbytes = sum(part.segment.nbytes for part in parts)
            if found and (held + nbytes > most or parts[0].itemsize != self.sections[found[0]][0].itemsize):
                yield tuple(found)
                found, held = [], 0
            found.append(number)
            held += nbytes
        yield tuple(found)


@dataclass(eq=False)
class _Incoming:
    """A stream that this rank receives."""

    source: int
    stream: Stream
    total: torch.Tensor
    rooms: list[torch.Tensor] = field(default_factory=list)
    applier: Applier | None = None
    expected: int = 0
    changed: int = 0
    received_bytes: int = 0
    ended: bool = False


class DeltaPath:
    """The streams of one rank in one epoch, beside the transport that carries dense refits.

    Args:
        group: of all ranks, its own.
        rank: of the refit world and of the group.
        plan: this rank's.
        where: the base is kept: ``gpu`` or ``host``; or ``optimizer`` for a mask in its place.
        bucket_bytes: that all buffers for blocks take together at most in one direction, if there are few streams.
        verify: ``off``, or the weight sums of both sides are compared in each refit. With masks, a sender reads all of its weights for
            them with ``full``, and with ``sampled`` those of some sections, in turns.
        describe_rank: what a user calls a rank.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        plan: Plan,
        where: str,
        bucket_bytes: int,
        verify: str,
        describe_rank: Callable[[int], str],
    ):
        self._group, self._rank, self._where, self._verify = group, rank, where, verify
        self._who = describe_rank
        self._bucket_bytes = bucket_bytes
        self._sent, self._received = sent(plan), received(plan)
        self._device = group.device
        self._open = [group]
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []
        self._pack, self._wire, self._apply = (make_stream(self._device) for _ in range(3))
        self._events: dict[tuple[str, int], Event] = {}
        self._under_way: list[Exchange] = []
        self._places: tuple[Place, ...] | None = None
        # Whether a receiver holds other weights than were sent by a mask.
        self._void = False
        # Counts sparse refits.
        self._turn = 0
        # Of the step before: what has arrived of each source, to be written.
        self._arrived: list[tuple[_Incoming, torch.Tensor, torch.Tensor, int]] = []

    def describe(self) -> dict[int, list[list[int]]]:
        """For each trainer rank which of its messages this rank gets, in the order of its stream."""
        return {origin: [list(key) for key, _ in held] for origin, held in self._received.items()}

    def connect(self, wanted: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Learn who gets what, and connect; all ranks at the same time.

        Args:
            wanted: what each rank that gets something from this one described for it.

        Raises:
            RefitMismatch: a rank wants what this rank does not send.
            RefitTimeout, PeerLost: a peer did not connect.
            TransportUnavailable: the group can't join this rank and a peer. The other ranks' calls end.
        """
        by_key: dict[Any, _Outgoing] = {}
        for receiver, keys in sorted(wanted.items()):
            try:
                stream = Stream.of(self._sent[int(first), int(number)] for first, number in keys)
            except (KeyError, TypeError, ValueError) as error:
                raise RefitMismatch(
                    f"{self._who(receiver)} expects messages that this rank does not send ({error!r}); nothing was written. "
                    "Do all ranks run the same rlrefit?",
                    stage="connect",
                    rank=self._rank,
                    blamed=receiver,
                ) from error
            if stream.parts:
                by_key.setdefault(stream.key, _Outgoing(stream, [])).receivers.append(receiver)
        self._outgoing = list(by_key.values())
        for one in self._outgoing:
            one.sections = one.stream.sections(self._room_bytes(len(self._outgoing)) * _ROOM_SHARE)
        for source, held in sorted(self._received.items()):
            stream = Stream.of(message for _, message in held)
            if stream.parts:
                total = torch.zeros(1, dtype=torch.int64, device=self._device)
                self._incoming.append(_Incoming(source, stream, total))
        self._group.connect(
            sorted(
                {*(r for one in self._outgoing for r in one.receivers), *(i.source for i in self._incoming)}
            )
        )

    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Look at where this rank's weights lie; again whenever they have moved. What the base holds stays.

        Raises:
            TransportUnavailable: the base finds no memory, or weights lie where the device can't compare them.
        """
        with self.on_device():
            self._bind(LiveViews(fragments, self._device))

    def _bind(self, views: LiveViews) -> None:
        # Nothing is made anew where all lies as before: on the ranks that follow another one, and usually after a sleep.
        places, self._places = self._places, views.places()
        if places == self._places:
            return
        try:
            bases = []
            for one in self._outgoing:
                one.packer = None
                self._require_readable(one.stream, views)
                if one.base is None:
                    one.base = self._allocated(partial(self._make_base, one))
                bases.append((one.sections, one.base))
            packers = make_packers(bases, views, self._device, weighs=self._verify != "off")
            for one, packer in zip(self._outgoing, packers, strict=True):
                one.packer = packer
                # Weights that come back with other strides may take more blocks.
                if not one.rooms or packer.entries > len(one.rooms[0].entries):
                    nbytes = self._room_bytes(len(self._outgoing))
                    make = partial(Room, packer.entries, nbytes, self._device)
                    one.rooms = [self._allocated(make) for _ in range(_SLOTS)]
            made = make_appliers([(i.stream, i.total) for i in self._incoming], views, self._device)
            for source, applier in zip(self._incoming, made, strict=True):
                source.applier = applier
        except (NotComputable, torch.OutOfMemoryError) as error:
            raise self._unavailable(error) from error
        if self._device.type == "cuda":
            # The tables must have reached the device: a refit may run on another stream than this one.
            torch.cuda.current_stream(self._device).synchronize()

    def _make_base(self, one: _Outgoing) -> Base | Mask:
        if self._where == "optimizer":
            return Mask(one.stream, len(one.sections), self._device)
        return Base(one.stream, self._device, self._where)

    def make_recorders(self, fragments: Sequence[Fragment]) -> list[tuple[StepRecorder, int]]:
        """For each stream that this rank sends by a mask, what records its steps, and bytes of a copy.

        Args:
            fragments: this rank's where they lie now, which may be elsewhere than where they are sent from.

        Raises:
            NotComputable: weights lie where the device can't read them.
        """
        views = LiveViews(fragments, self._device)
        masks = [(one.sections, one.base) for one in self._outgoing if isinstance(one.base, Mask)]
        with self.on_device():
            for one in self._outgoing:
                self._require_readable(one.stream, views)
            made = make_recorders(masks, views, self._device)
        return [(recorder, one.stream.nbytes) for recorder, one in zip(made, self._outgoing, strict=True)]

    def _allocated[T](self, make: Callable[[], T]) -> T:
        try:
            return make()
        except RuntimeError as error:  # of any allocator: the device's, page-locked memory's
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> TransportUnavailable:
        return TransportUnavailable(f"deltas can't be made: {error}", stage="bind", rank=self._rank)

    def _require_readable(self, stream: Stream, views: LiveViews) -> None:
        for part in stream.parts:
            live = views.of(part.segment)
            if copied_by_host(self._device, live if isinstance(live, torch.Tensor) else live.held):
                raise NotComputable(
                    f"{part.segment.name} lies in host memory that {self._device} can't read; offload to pinned memory"
                )

    def take(self, clock: StageClock, *, void: bool) -> int:
        """After a dense refit: take what was sent as the base, or as what no mask marks, and compare all of it with what the receivers hold.

        Args:
            clock: of the refit.
            void: whether what this rank sent counts for nothing, so that nobody compares it.

        Returns:
            Bytes that were compared on this rank.

        Raises:
            VerificationError: a receiver holds other bytes than were sent.
            PeerLost, RefitTimeout: from the wire.
        """
        with clock.stage("verify"), self.on_device():
            for one in self._outgoing:
                assert one.packer is not None, "bind comes before take"
                one.packer.take()
            for source in self._incoming:
                assert source.applier is not None, "bind comes before take"
                source.applier.weigh()
            told = {i: torch.zeros(2, dtype=torch.int64, device=self._device) for i in self._incoming}
            sends = []
            for one in self._outgoing:
                assert one.base is not None, "bind comes before take"
                buffer = torch.cat([one.base.total, torch.full_like(one.base.total, void)]).view(torch.uint8)
                sends += [PeerBuffer(receiver, buffer) for receiver in one.receivers]
            receives = [PeerBuffer(i.source, held.view(torch.uint8)) for i, held in told.items()]
            if sends or receives:
                self._group.exchange(sends, receives, "verify")
            for source, held in told.items():
                source.expected, is_void = held.tolist()
                if not is_void:
                    self._compare(source)
        return sum(i.stream.payload_bytes for i in self._incoming) if self._verify != "off" else 0

    def run(
        self, clock: StageClock, meanwhile: Callable[[], None], *, weighs_all: bool = False
    ) -> TransferResult:
        """Move what differs from the base, or is marked.

        With masks the result is void on a receiver that holds other weights then than the sender: something was not marked.

        Args:
            clock: of the refit.
            meanwhile: as :meth:`..transport.Transport.run`.
            weighs_all: with masks, read all weights of this rank for their sums, whatever ``verify`` says: what was recorded may not be
                all that was written.

        Raises:
            PeerLost, RefitTimeout: from the wire.
            VerificationError: what a receiver holds now is not what the sender's base holds; without masks.
            RefitError: a receiver has no memory for what comes.
        """
        caller = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def on_callers_stream() -> None:
            if caller is not None:
                torch.cuda.set_stream(caller)
            meanwhile()

        try:
            with self.on_device():
                self._run(clock, on_callers_stream, weighs_all)
        except BaseException:
            for exchange in self._under_way:
                exchange.drop()
            raise
        finally:
            self._under_way, self._arrived = [], []
            if caller is not None:
                torch.cuda.set_stream(caller)
        return self._result()

    def intact(self) -> bool:
        """Whether all live weights that this rank receives are still what the last refit left; reads them, and adds them up.

        Raises:
            PeerLost, RefitTimeout: another rank gave up, or the device does not get through its work.
        """
        left = [source.total.clone() for source in self._incoming]
        with self.on_device():
            for source in self._incoming:
                assert source.applier is not None, "bind comes before intact"
                source.applier.weigh()
            self._group.wait_for_stream("handshake")
        return not left or torch.equal(torch.cat(left), torch.cat([one.total for one in self._incoming]))

    def release(self) -> None:
        """Between refits: free what blocks have arrived in, where the device's memory is for others meanwhile."""
        for source in self._incoming:
            source.rooms = []

    def close(self, *, failed: bool = False) -> None:
        """Close the group and free the base and all buffers; safe to call twice."""
        opened, self._open = self._open, []
        try:
            end_all(partial(group.close, failed=failed) for group in opened)
        finally:
            if failed:
                drain((self._pack, self._wire, self._apply), self._device, self._outgoing, self._incoming)
            self._outgoing, self._incoming = [], []

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels run on the current device, which is the caller's, and another one maybe."""
        return working_on(self._device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that this rank has for blocks."""
        rooms = sum(room.nbytes for one in self._outgoing for room in one.rooms)
        return self._group.staging_bytes + rooms + sum(r.nbytes for i in self._incoming for r in i.rooms)

    @property
    def base_bytes(self) -> int:
        """Bytes of the bases that this rank keeps on the device."""
        kept = [one.base for one in self._outgoing if one.base is not None]
        kept += [base.marks for base in kept if isinstance(base, Base) and base.marks is not None]
        return sum(one.memory.nbytes for one in kept if one.memory.device.type == self._device.type)

    def _room_bytes(self, streams: int) -> int:
        return min(max(LEAST_ROOM, self._bucket_bytes // (_SLOTS * max(1, streams))), _MOST_ROOM)

    def _run(self, clock: StageClock, meanwhile: Callable[[], None], weighs_all: bool) -> None:
        for stream in (self._pack, self._wire, self._apply):
            stream.wait_caller()
        for one in self._outgoing:
            one.queue, one.packed = deque(one.passes()), {}
            one.changed, one.sent_bytes, one.ended = 0, 0, False
        for source in self._incoming:
            source.ended, source.received_bytes = False, 0
        self._void = False
        self._pack.enter()
        for one in self._outgoing:
            assert one.packer is not None, "bind comes before run"
            one.packer.begin(self._weighed(len(one.sections), weighs_all))
        self._turn += 1
        self._pack_next(0, clock)
        # In the same place of every rank's order of exchanges.
        meanwhile()
        step = 0
        while not all(one.ended for one in self._outgoing) or not all(i.ended for i in self._incoming):
            self._step(step, clock)
            step += 1
        self._end(clock, step)

    def _weighed(self, sections: int, all_of_them: bool) -> range:
        """Sections of a stream whose weights are read for their sums in this refit."""
        if self._verify == "off":
            return range(0)
        if self._verify == "full" or all_of_them:
            return range(sections)
        turns = min(SAMPLED_WITHIN, sections)
        return range(self._turn % turns, sections, turns)

    def _pack_next(self, step: int, clock: StageClock, only: Sequence[_Outgoing] | None = None) -> None:
        """Pack the next sections of each stream into the slot of ``step``."""
        due = [one for one in (self._outgoing if only is None else only) if one.queue]
        if not due:
            return
        self._pack.enter()
        if step >= _SLOTS:
            self._pack.wait_event(self._event("sent", step - _SLOTS))
        with self._pack.timed(clock, "pack", self._event("packed", step)):
            for one in due:
                assert one.packer is not None, "bind comes before run"
                one.packed[step] = one.queue.popleft()
                one.packer.pack(one.packed[step], one.rooms[step % _SLOTS])
                one.rooms[step % _SLOTS].tell()

    def _step(self, step: int, clock: StageClock) -> None:
        """Send and receive the blocks of one pass of each stream that has not ended."""
        slot = step % _SLOTS
        self._pack_next(step + 1, clock)
        sending = [one for one in self._outgoing if not one.ended]
        receiving = [one for one in self._incoming if not one.ended]
        with clock.waiting():
            self._group.wait_for([self._event("packed", step)], "transfer")
        counts = {one: one.rooms[slot].told() for one in sending}
        late = []
        for one in sending:
            if counts[one].without_room:
                one.queue.extend((section,) for section in one.packed[step])
                late.append(one)
            one.ended = not one.queue and step + 1 not in one.packed
        self._pack_next(step + 1, clock, [one for one in late if step + 1 not in one.packed])
        headers = self._exchange_headers(step, sending, receiving, counts, clock)
        self._apply_arrived(step - 1, clock)
        receives, arrived = [], []
        # Rooms are allocated on the stream that fills them, which waits for those who read what lay there before.
        self._wire.enter()
        for source in receiving:
            told = headers[source.source]
            source.expected, source.changed, source.ended = told.total, told.changed, bool(told.last)
            source.received_bytes += told.blocks * ENTRY_BYTES + told.nbytes
            entries, data = self._room_for(source, slot, told.blocks, told.nbytes)
            receives += [PeerBuffer(source.source, part) for part in (entries, data) if part.numel()]
            arrived.append((source, entries.view(torch.int64).view(-1, 2), data, told.itemsize))
        sends = []
        for one in sending:
            one.changed += counts[one].changed
            payload = [part for part in one.rooms[slot].payload(counts[one]) if part.numel()]
            one.sent_bytes += sum(part.nbytes for part in payload) * len(one.receivers)
            sends += [PeerBuffer(receiver, part) for receiver in one.receivers for part in payload]
        if step >= _SLOTS:
            self._wire.wait_event(self._event("applied", step - _SLOTS))
        exchange = self._prepare(sends, receives)
        event = self._event("sent", step)
        with self._wire.timed(clock, "transfer", event, exchange.finish):
            exchange.start("transfer")
        self._arrived = arrived

    def _apply_arrived(self, step: int, clock: StageClock) -> None:
        """Write the blocks of a step that have landed.

        Only once the host knows that they have, and that no peer has gone: an exchange that was given up leaves anything in
        the rooms, and blocks tell where they are written.
        """
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        with clock.waiting():
            self._group.wait_for([self._event("sent", step)], "transfer")
        self._apply.enter()
        self._apply.wait_event(self._event("sent", step))
        with self._apply.timed(clock, "unpack", self._event("applied", step)):
            for source, entries, data, itemsize in arrived:
                assert source.applier is not None, "bind comes before run"
                try:
                    source.applier.apply(entries, data, itemsize)
                except Damaged as error:
                    raise self._damaged(source, error) from error

    def _exchange_headers(
        self,
        step: int,
        sending: Sequence[_Outgoing],
        receiving: Sequence[_Incoming],
        counts: Mapping[_Outgoing, Counts],
        clock: StageClock,
    ) -> dict[int, Header]:
        """What each source tells of its blocks of this step."""
        on_gpu = self._device.type == "cuda"
        told = torch.zeros(len(sending), len(Header._fields), dtype=torch.int64, pin_memory=on_gpu)
        self._wire.enter()
        if sending:
            # The weight sum moves on as the next section is packed, and is read once the last one has been.
            self._wire.wait_event(self._event("packed", step))
        for row, one in zip(told, sending, strict=True):
            assert one.packer is not None, "bind comes before run"
            size, changed = one.packer.itemsizes[one.packed[step][0]], one.changed + counts[one].changed
            row.copy_(torch.tensor(Header.of(counts[one], size, last=one.ended, changed=changed)))
        out = told.to(self._device, non_blocking=True)
        for row, one in zip(out, sending, strict=True):
            assert one.base is not None, "bind comes before run"
            row[4:5].copy_(one.base.total)
        into = torch.zeros(len(receiving), len(Header._fields), dtype=torch.int64, device=self._device)
        exchange = self._prepare(
            [
                PeerBuffer(r, row.view(torch.uint8))
                for row, one in zip(out, sending, strict=True)
                for r in one.receivers
            ],
            [PeerBuffer(i.source, row.view(torch.uint8)) for row, i in zip(into, receiving, strict=True)],
        )
        event = self._event("header", step)
        # Before the stream waits for a peer: page-locked memory that is taken anew may wait for the whole device.
        arrived = torch.empty(into.shape, dtype=torch.int64, pin_memory=on_gpu)
        with self._wire.timed(clock, "transfer", event, exchange.finish):
            exchange.start("transfer")
            if on_gpu:
                arrived.copy_(into, non_blocking=True)
        with clock.waiting():
            self._group.wait_for([event], "transfer")
        rows = (arrived if on_gpu else into).tolist()
        headers = {}
        for source, row in zip(receiving, rows, strict=True):
            try:
                headers[source.source] = Header.read(row)
            except Damaged as error:
                raise self._damaged(source, error) from error
        return headers

    def _damaged(self, source: _Incoming, error: Damaged) -> VerificationError:
        return VerificationError(
            f"what {self._who(source.source)} sent of its weights arrived damaged: {error}. None of it was written, but blocks before "
            "it may have been. The engine stays dirty; open a session with a new epoch, whose first refit is dense",
            stage="unpack",
            rank=self._rank,
            parameter=source.stream.parts[0].segment.name,
            blamed=source.source,
        )

    def _room_for(
        self, source: _Incoming, slot: int, blocks: int, nbytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the blocks of one pass: entries and data, uint8."""
        head = blocks * ENTRY_BYTES
        while len(source.rooms) < _SLOTS:
            source.rooms.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if source.rooms[slot].numel() < head + nbytes:
            # Rounded up, so that the next refits find it large enough.
            rounded = -(-(head + nbytes) // LEAST_ROOM) * LEAST_ROOM
            try:
                source.rooms[slot] = torch.empty(rounded, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                raise RefitError(
                    f"no {rounded >> 20} MiB on {self._device} for what {self._who(source.source)} sends of its changes: "
                    f"{error}. The engine stays dirty. Lower policy.refit.bucket_mb, or set policy.refit.delta to off",
                    stage="transfer",
                    rank=self._rank,
                ) from error
        room = source.rooms[slot]
        return room[:head], room[head : head + nbytes]

    def _end(self, clock: StageClock, steps: int) -> None:
        """Wait for all, and compare the weight sums."""
        for one in self._outgoing:
            one.density = one.sent_bytes / (one.stream.nbytes * len(one.receivers))
        self._apply_arrived(steps - 1, clock)
        events = [self._event(kind, step) for step in range(steps) for kind in ("sent", "applied")]
        with clock.waiting():
            self._group.wait_for(events, "transfer")
        with clock.stage("verify"):
            for source in self._incoming:
                if not self._differs(source):
                    continue
                if self._where == "optimizer":
                    self._void = True
                    logger.warning(
                        "%s does not hold what %s holds, after what its recorded steps had changed was sent. Something else wrote "
                        "weights since the last refit: the trainer's outside recording_changes(), or the engine's; or bytes were "
                        "damaged or lost. All weights are sent once more, before this refit commits",
                        self._who(self._rank),
                        self._who(source.source),
                    )
                else:
                    self._compare(source)

    def _differs(self, source: _Incoming) -> bool:
        return self._verify != "off" and int(source.total) != source.expected

    def _compare(self, source: _Incoming) -> None:
        if self._differs(source):
            raise VerificationError(
                f"the weights of this rank are not what {self._who(source.source)} sent: the sums over all {len(source.stream.parts)} "
                "parts that it sends differ. The engine's weights were written by something else since the last refit, or bytes "
                "were damaged or lost. The engine stays dirty; open a session with a new epoch, whose first refit is dense",
                stage="verify",
                rank=self._rank,
                parameter=source.stream.parts[0].segment.name,
                blamed=source.source,
            )

    def _result(self) -> TransferResult:
        payload = sum(one.stream.payload_bytes * len(one.receivers) for one in self._outgoing)
        payload += sum(i.stream.payload_bytes for i in self._incoming)
        verified = sum(i.stream.payload_bytes for i in self._incoming) if self._verify != "off" else 0
        sides = [(o.changed, o.stream.elements) for o in self._outgoing] or [
            (i.changed, i.stream.elements) for i in self._incoming
        ]
        elements = sum(of for _, of in sides)
        return TransferResult(
            payload,
            verified,
            wire_bytes=sum(o.sent_bytes for o in self._outgoing)
            + sum(i.received_bytes for i in self._incoming),
            changed_share=sum(n for n, _ in sides) / elements if elements else 0.0,
            void=self._void,
        )

    def _event(self, kind: str, step: int) -> Event:
        found = self._events.get((kind, step))
        if found is None:
            found = self._events[kind, step] = make_event(self._device)
        return found

    def _prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> Exchange:
        exchange = self._group.prepare(sends, receives)
        self._under_way.append(exchange)
        return exchange
