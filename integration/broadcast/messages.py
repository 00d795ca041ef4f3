"""Messages of full tensors from trainer rank 0 to all generation ranks, which know nothing of them before.

Every message is a head of fixed size, the names and places of what it carries, and a bucket of bytes. Head and names decide where
bytes go, so both carry digests that are compared in every message, whatever ``verify`` says. What a sender says is held
to the bucket and to the messages before it, before the next message is waited for: a rank that fails can then tell the
others at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from typing import NamedTuple

import torch

from ..comm.group import Group
from ..errors import RefitMismatch, VerificationError
from ..plan import aligned
from ..weights.manifest import dtype_of
from .buckets import Buckets

LAST, CHECKED = 1, 2
# Of a head, the digest of the description (two words), the seal of all these, and the checksum of the bucket (two words).
_HEAD_WORDS = 9
_SUMS = slice(7, 9)


class TensorPart(NamedTuple):
    """Bytes ``start`` to ``start + nbytes`` of a tensor, at ``offset`` of a bucket."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    nbytes: int
    offset: int


class MessageHead(NamedTuple):
    """Bytes of the bucket and of its description, which message of the refit it is, and :data:`LAST` and :data:`CHECKED`."""

    nbytes: int
    described: int
    number: int
    flags: int


class Arrived(NamedTuple):
    """One message: what stands where in the bucket, whether it ends the refit, and whether its checksum was compared."""

    parts: list[TensorPart]
    bucket: torch.Tensor
    last: bool
    checked: bool


class Messages:
    """Sends or receives messages; :meth:`send` and :meth:`receive` are called in one thread, on a stream of its own.

    Args:
        group: trainer rank 0 as its rank 0, and all generation ranks.
        rank: in the refit world, for errors.
        bucket_bytes: the most bytes of tensors in a message.
        verify: of the buckets' bytes: ``off``, ``sampled`` (one message of a refit, another one each time; all of the first
            refit, whose number of messages nobody knows) or ``full``.
        turn: at which message sampled checks begin.
    """

    def __init__(self, group: Group, rank: int, bucket_bytes: int, verify: str, turn: int):
        self.device = group.device
        self.rank = rank
        # Whole units of alignment, so that what fits by its bytes fits by its place.
        self.bucket_bytes = max(aligned(1), bucket_bytes - bucket_bytes % aligned(1))
        self._group = group
        # Not held between updates: an inference engine on the same GPU needs the memory then.
        self._buckets = Buckets(group, rank, verify, turn)
        self._last_count = 1
        self._assembly = Assembly(rank)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def to_pack(self) -> torch.Tensor:
        """A bucket to be packed while the one before is sent: uint8 ``[bucket_bytes]``."""
        return self._buckets.to_pack(self.bucket_bytes)

    def free(self) -> bool:
        """As :meth:`Buckets.free`."""
        return self._buckets.free()

    def packed(self) -> torch.cuda.Event | None:
        """To be called where a bucket was packed: what :meth:`send` waits for on a GPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def send(
        self,
        bucket: torch.Tensor,
        parts: Sequence[TensorPart],
        index: int,
        last: bool,
        packed: torch.cuda.Event | None,
    ) -> None:
        """Send one bucket, and return once it has left the device."""
        with self._on_stream(packed):
            described = write_description(parts)
            checked = bucket.numel() > 0 and self._buckets.checks(index, self._last_count)
            flags = (LAST if last else 0) | (CHECKED if checked else 0)
            words = write_head(MessageHead(bucket.numel(), len(described), index, flags), described)
            head = torch.tensor(words, dtype=torch.int64, device=self.device)
            if checked:
                self._buckets.checksum(bucket, _sums_of(head))
            self._group.broadcast(head, 0, "misc")
            tail = torch.frombuffer(bytearray(described), dtype=torch.uint8).to(self.device)
            self._group.broadcast(tail, 0, "misc")
            if bucket.numel():
                self._buckets.send(bucket)
                self._buckets.drain()
        if last:
            self._buckets.refits += 1
            self._last_count = index + 1

    def receive(self, index: int) -> Arrived:
        """Receive one bucket into memory of its own, and compare its checksum if it carries one.

        Raises:
            RefitMismatch: another message came than was expected, or it contradicts itself or those before it.
            VerificationError: other bytes came than were sent, of the bucket or of what is said of it.
        """
        with self._on_stream(None):
            words = torch.empty(_HEAD_WORDS, dtype=torch.int64, device=self.device)
            self._group.broadcast(words, 0, "misc")
            told: list[int] = words.tolist()
            head = read_head(told, index, self.bucket_bytes, self.rank)
            tail = torch.empty(head.described, dtype=torch.uint8, device=self.device)
            self._group.broadcast(tail, 0, "misc")
            parts = read_description(tail.cpu().numpy().tobytes(), told, self.rank)
            if index == 0:
                self._assembly = Assembly(self.rank)
            self._assembly.take(head, parts)
            bucket = torch.empty(0, dtype=torch.uint8, device=self.device)
            if head.nbytes:
                self._buckets.receive(head.nbytes)
                bucket = self._buckets.arrived()
            checked = bool(head.flags & CHECKED)
            if checked:
                self._buckets.compare(
                    bucket, _sums_of(words), list(dict.fromkeys(part.name for part in parts))
                )
        return Arrived(parts, bucket, bool(head.flags & LAST), checked)

    def close(self, *, failed: bool = False) -> None:
        """Close the group; safe to call twice. ``failed``: peers may be gone."""
        self._buckets.close(failed=failed)

    @contextmanager
    def _on_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield


def write_description(parts: Sequence[TensorPart]) -> bytes:
    """The parts as they travel."""
    return json.dumps(parts, separators=(",", ":")).encode()


def write_head(head: MessageHead, description: bytes) -> list[int]:
    """The head's words; the bucket's checksum is still 0 (:func:`_sums_of`)."""
    words = [*head, *_digest(description, 2)]
    return [*words, *_digest(_packed(words), 1), 0, 0]


def _sums_of(words: torch.Tensor) -> torch.Tensor:
    """Of a head's words those for the bucket's checksum; a view."""
    return words[_SUMS]


def read_head(words: Sequence[int], number: int, bucket_bytes: int, rank: int) -> MessageHead:
    """The head of message ``number``, whose sizes can be relied on.

    Raises:
        VerificationError: it is not what was sealed.
        RefitMismatch: another message came, or it says what can't be.
    """
    head = MessageHead(*words[:4])
    if _digest(_packed(words[:6]), 1) != list(words[6:7]):
        raise _damaged(f"the head of message {number} of an update", rank)
    if head.number != number:
        raise _wrong(f"message {head.number} of an update came where {number} was due", rank)
    if not 0 <= head.nbytes <= bucket_bytes:
        raise _wrong(
            f"message {number} of an update brings {head.nbytes} bytes, and buckets hold {bucket_bytes}", rank
        )
    if head.described < 2 or head.flags & ~(LAST | CHECKED):
        raise _wrong(
            f"message {number} of an update has {head.described} bytes of names and flags {head.flags}", rank
        )
    return head


def read_description(raw: bytes, words: Sequence[int], rank: int) -> list[TensorPart]:
    """The parts of a message, each by itself as a part can be.

    Raises:
        VerificationError: other bytes came than the head was made for.
        RefitMismatch: they are no list of parts; names the first that is none.
    """
    what = f"the names and places in message {words[2]} of an update"
    if _digest(raw, 2) != list(words[4:6]):
        raise _damaged(what, rank)
    try:
        rows = json.loads(raw)
    except ValueError as error:  # of the text, or of its encoding
        raise _wrong(f"{what} are no JSON ({error})", rank) from error
    if not isinstance(rows, list):
        raise _wrong(f"{what} are a {type(rows).__name__}, not a list", rank)
    return [_read(row, what, rank) for row in rows]


class Assembly:
    """Follows the messages of one refit: each weight comes once, each part where the last one ended.

    Args:
        rank: in the refit world, for errors.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._names: set[str] = set()
        # The part whose tensor is not complete yet.
        self._open: TensorPart | None = None

    def take(self, head: MessageHead, parts: Sequence[TensorPart]) -> None:
        """Take note of a message.

        Raises:
            RefitMismatch: its parts lie beyond the bucket or on one another, don't go on where the message before ended,
                bring a weight twice, or leave one unfinished; names the weight.
        """
        end = 0
        for part in parts:
            self._place(part, end, head)
            end = part.offset + part.nbytes
            self._follow(part)
        if self._open is not None and head.flags & LAST:
            raise self._contradiction(
                self._open,
                f"has {_total(self._open)} bytes, and the last message ends at its byte "
                f"{self._open.start + self._open.nbytes}",
            )

    def _place(self, part: TensorPart, end: int, head: MessageHead) -> None:
        if part.offset + part.nbytes > head.nbytes:
            raise self._contradiction(
                part,
                f"lies at bytes {part.offset} to {part.offset + part.nbytes} of a bucket of {head.nbytes}",
            )
        if part.offset < end:
            raise self._contradiction(
                part, f"lies at byte {part.offset} of a bucket, on what stands there up to byte {end}"
            )

    def _follow(self, part: TensorPart) -> None:
        before, self._open = self._open, None
        if before is None:
            if part.start != 0:
                raise self._contradiction(
                    part, f"goes on at its byte {part.start}, and nothing of it came before"
                )
            if part.name in self._names:
                raise self._contradiction(part, "comes twice")
            self._names.add(part.name)
        elif (*part[:3], part.start) != (*before[:3], before.start + before.nbytes):
            raise self._contradiction(
                before,
                f"is {before.dtype}{before.shape} up to its byte {before.start + before.nbytes}, and then comes "
                f"{part.name} as {part.dtype}{part.shape} from byte {part.start}",
            )
        if part.start + part.nbytes < _total(part):
            self._open = part

    def _contradiction(self, part: TensorPart, what: str) -> RefitMismatch:
        return _wrong(f"a weight of an update {what}", self._rank, part.name)


def _read(row: object, what: str, rank: int) -> TensorPart:
    if not isinstance(row, list) or len(row) != len(TensorPart._fields):
        raise _wrong(f"{what} have an entry that is no part: {row!r:.200}", rank)
    part = TensorPart(*row)
    name = part.name if isinstance(part.name, str) else ""
    numbers = (part.start, part.nbytes, part.offset)
    shape = part.shape if isinstance(part.shape, list) else [part.shape]
    if (
        not isinstance(part.name, str)
        or not isinstance(part.dtype, str)
        or not isinstance(part.shape, list)
        or any(type(n) is not int or n < 0 for n in (*numbers, *shape))
    ):
        raise _wrong(f"{what} have an entry that is no part: {row!r:.200}", rank, name)
    try:
        total = _total(part)
    except ValueError as error:
        raise _wrong(f"{what} have a weight of a dtype that is none: {error}", rank, name) from error
    if part.start + part.nbytes > total or (not part.nbytes and total):
        raise _wrong(
            f"{what} have bytes {part.start} to {part.start + part.nbytes} of a weight of {total}, "
            f"{part.dtype}{part.shape}",
            rank,
            name,
        )
    if part.offset != aligned(part.offset):
        raise _wrong(f"{what} have a weight at byte {part.offset}, where none begins", rank, name)
    return part


def _total(part: TensorPart) -> int:
    """Bytes of the whole tensor."""
    return dtype_of(part.dtype).itemsize * prod(part.shape)


def _digest(data: bytes, words: int) -> list[int]:
    return list(struct.unpack(f"<{words}q", sha256(data).digest()[: 8 * words]))


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}q", *words)


def _damaged(what: str, rank: int) -> VerificationError:
    return VerificationError(
        f"{what} did not arrive as sent. Nothing of that message was handed to the engine, which must not generate before "
        "the next update. The network or a device's memory corrupts data: update again, and replace the hardware if it comes "
        "back",
        stage="verify",
        rank=rank,
    )


def _wrong(what: str, rank: int, name: str = "") -> RefitMismatch:
    return RefitMismatch(
        f"{what}. Nothing of that message was handed to the engine, which must not generate before the next update. Run the "
        "same rlrefit on all ranks",
        stage="misc",
        rank=rank,
        parameter=name,
    )
