"""Messages of full tensors from trainer rank 0 to all generation ranks.

Nothing has to be known before: every message is a head of fixed size, the names and places of what it carries, and a
bucket of bytes. What :mod:`.pieces` says of the first two is found out here, before the next message is waited for: a rank
that fails can then tell the others at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..comm.group import Group
from ..errors import VerificationError
from ..packing import make_checksums
from ..plan import aligned
from .pieces import (
    CHECKED,
    HEAD_WORDS,
    LAST,
    Assembly,
    Head,
    Piece,
    read_description,
    read_head,
    sums_of,
    write_description,
    write_head,
)


class Arrived(NamedTuple):
    """One message: what stands where in the bucket, whether it ends the refit, and whether its checksum was compared."""

    pieces: list[Piece]
    bucket: torch.Tensor
    last: bool
    checked: bool


class Wire:
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
        self._verify = verify
        self._turn = turn
        self._refits = 0
        self._last_count = 1
        self._assembly = Assembly(rank)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

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
        pieces: Sequence[Piece],
        index: int,
        last: bool,
        packed: torch.cuda.Event | None,
    ) -> None:
        """Send one bucket, and return once it has left the device."""
        with self._on_stream(packed):
            described = write_description(pieces)
            checked = bucket.numel() > 0 and self._checks(index)
            flags = (LAST if last else 0) | (CHECKED if checked else 0)
            words = write_head(Head(bucket.numel(), len(described), index, flags), described)
            head = torch.tensor(words, dtype=torch.int64, device=self.device)
            if checked:
                make_checksums([(bucket, 0)], self.device).compute(sums_of(head))
            self._group.broadcast(head, 0, "misc")
            tail = torch.frombuffer(bytearray(described), dtype=torch.uint8).to(self.device)
            self._group.broadcast(tail, 0, "misc")
            if bucket.numel():
                self._group.broadcast(bucket, 0, "misc")
        if last:
            self._refits += 1
            self._last_count = index + 1

    def receive(self, index: int) -> Arrived:
        """Receive one bucket into memory of its own, and compare its checksum if it carries one.

        Raises:
            RefitMismatch: another message came than was expected, or it contradicts itself or those before it.
            VerificationError: other bytes came than were sent, of the bucket or of what is said of it.
        """
        with self._on_stream(None):
            words = torch.empty(HEAD_WORDS, dtype=torch.int64, device=self.device)
            self._group.broadcast(words, 0, "misc")
            told: list[int] = words.tolist()
            head = read_head(told, index, self.bucket_bytes, self.rank)
            tail = torch.empty(head.described, dtype=torch.uint8, device=self.device)
            self._group.broadcast(tail, 0, "misc")
            pieces = read_description(tail.cpu().numpy().tobytes(), told, self.rank)
            if index == 0:
                self._assembly = Assembly(self.rank)
            self._assembly.take(head, pieces)
            bucket = torch.empty(head.nbytes, dtype=torch.uint8, device=self.device)
            if head.nbytes:
                self._group.broadcast(bucket, 0, "misc")
            checked = bool(head.flags & CHECKED)
            if checked:
                self._compare(bucket, pieces, sums_of(words))
        return Arrived(pieces, bucket, bool(head.flags & LAST), checked)

    def _checks(self, index: int) -> bool:
        # Sampled among as many messages as the last refit had, since the end of this one is not known yet.
        sampled = index % self._last_count == (self._turn + self._refits) % self._last_count
        return self._verify == "full" or (self._verify == "sampled" and sampled)

    def _compare(self, bucket: torch.Tensor, pieces: Sequence[Piece], sent: torch.Tensor) -> None:
        found = torch.empty(2, dtype=torch.int64, device=self.device)
        make_checksums([(bucket, 0)], self.device).compute(found)
        if not torch.equal(found, sent):
            names = list(dict.fromkeys(piece.name for piece in pieces))
            raise VerificationError(
                f"a bucket of {len(names)} weights arrived with other bytes than were sent: {', '.join(names[:5])}"
                f"{' …' if len(names) > 5 else ''}. Nothing of it was handed to the engine, which must not generate "
                "before the next update. The wire or a device's memory corrupts data: update again, and replace the "
                "hardware if it comes back",
                stage="verify",
                rank=self.rank,
                parameter=names[0] if names else "",
            )

    @contextmanager
    def _on_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
