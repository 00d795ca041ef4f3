"""What a message of full tensors says of itself: its head, the pieces that its bucket holds, and whether they fit together.

The head and the names decide where bytes go, so both carry digests that are compared in every message, whatever
``verify`` says. What a sender of another make says is held to the bucket and to the messages before it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from hashlib import sha256
from math import prod
from typing import NamedTuple

import torch

from ..errors import RefitMismatch, VerificationError
from ..plan import aligned
from ..weights.manifest import dtype_of

LAST, CHECKED = 1, 2
# Of a head, the digest of the description (two words), the seal of all these, and the checksum of the bucket (two words).
HEAD_WORDS = 9
_SUMS = slice(7, 9)


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + nbytes`` of a tensor, at ``offset`` of a bucket."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    nbytes: int
    offset: int


class Head(NamedTuple):
    """Bytes of the bucket and of its description, which message of the refit it is, and :data:`LAST` and :data:`CHECKED`."""

    nbytes: int
    described: int
    number: int
    flags: int


def write_description(pieces: Sequence[Piece]) -> bytes:
    """The pieces as they travel."""
    return json.dumps(pieces, separators=(",", ":")).encode()


def write_head(head: Head, description: bytes) -> list[int]:
    """The head's words; the bucket's checksum is still 0 (:func:`sums_of`)."""
    words = [*head, *_digest(description, 2)]
    return [*words, *_digest(_packed(words), 1), 0, 0]


def sums_of(words: torch.Tensor) -> torch.Tensor:
    """Of a head's words those for the bucket's checksum; a view."""
    return words[_SUMS]


def read_head(words: Sequence[int], number: int, bucket_bytes: int, rank: int) -> Head:
    """The head of message ``number``, whose sizes can be relied on.

    Raises:
        VerificationError: it is not what was sealed.
        RefitMismatch: another message came, or it says what can't be.
    """
    head = Head(*words[:4])
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


def read_description(raw: bytes, words: Sequence[int], rank: int) -> list[Piece]:
    """The pieces of a message, each by itself as a piece can be.

    Raises:
        VerificationError: other bytes came than the head was made for.
        RefitMismatch: they are no list of pieces; names the first that is none.
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
    """Follows the messages of one refit: each weight comes once, each piece where the last one ended.

    Args:
        rank: in the refit world, for errors.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._names: set[str] = set()
        # The piece whose tensor is not complete yet.
        self._open: Piece | None = None

    def take(self, head: Head, pieces: Sequence[Piece]) -> None:
        """Take note of a message.

        Raises:
            RefitMismatch: its pieces lie beyond the bucket or on one another, don't go on where the message before ended,
                bring a weight twice, or leave one unfinished; names the weight.
        """
        end = 0
        for piece in pieces:
            self._place(piece, end, head)
            end = piece.offset + piece.nbytes
            self._follow(piece)
        if self._open is not None and head.flags & LAST:
            raise self._contradiction(
                self._open,
                f"has {_total(self._open)} bytes, and the last message ends at its byte "
                f"{self._open.start + self._open.nbytes}",
            )

    def _place(self, piece: Piece, end: int, head: Head) -> None:
        if piece.offset + piece.nbytes > head.nbytes:
            raise self._contradiction(
                piece,
                f"lies at bytes {piece.offset} to {piece.offset + piece.nbytes} of a bucket of {head.nbytes}",
            )
        if piece.offset < end:
            raise self._contradiction(
                piece, f"lies at byte {piece.offset} of a bucket, on what stands there up to byte {end}"
            )

    def _follow(self, piece: Piece) -> None:
        before, self._open = self._open, None
        if before is None:
            if piece.start != 0:
                raise self._contradiction(
                    piece, f"goes on at its byte {piece.start}, and nothing of it came before"
                )
            if piece.name in self._names:
                raise self._contradiction(piece, "comes twice")
            self._names.add(piece.name)
        elif (*piece[:3], piece.start) != (*before[:3], before.start + before.nbytes):
            raise self._contradiction(
                before,
                f"is {before.dtype}{before.shape} up to its byte {before.start + before.nbytes}, and then comes "
                f"{piece.name} as {piece.dtype}{piece.shape} from byte {piece.start}",
            )
        if piece.start + piece.nbytes < _total(piece):
            self._open = piece

    def _contradiction(self, piece: Piece, what: str) -> RefitMismatch:
        return _wrong(f"a weight of an update {what}", self._rank, piece.name)


def _read(row: object, what: str, rank: int) -> Piece:
    if not isinstance(row, list) or len(row) != len(Piece._fields):
        raise _wrong(f"{what} have an entry that is no piece: {row!r:.200}", rank)
    piece = Piece(*row)
    name = piece.name if isinstance(piece.name, str) else ""
    numbers = (piece.start, piece.nbytes, piece.offset)
    shape = piece.shape if isinstance(piece.shape, list) else [piece.shape]
    if (
        not isinstance(piece.name, str)
        or not isinstance(piece.dtype, str)
        or not isinstance(piece.shape, list)
        or any(type(n) is not int or n < 0 for n in (*numbers, *shape))
    ):
        raise _wrong(f"{what} have an entry that is no piece: {row!r:.200}", rank, name)
    try:
        total = _total(piece)
    except ValueError as error:
        raise _wrong(f"{what} have a weight of a dtype that is none: {error}", rank, name) from error
    if piece.start + piece.nbytes > total or (not piece.nbytes and total):
        raise _wrong(
            f"{what} have bytes {piece.start} to {piece.start + piece.nbytes} of a weight of {total}, "
            f"{piece.dtype}{piece.shape}",
            rank,
            name,
        )
    if piece.offset != aligned(piece.offset):
        raise _wrong(f"{what} have a weight at byte {piece.offset}, where none begins", rank, name)
    return piece


def _total(piece: Piece) -> int:
    """Bytes of the whole tensor."""
    return dtype_of(piece.dtype).itemsize * prod(piece.shape)


def _digest(data: bytes, words: int) -> list[int]:
    return list(struct.unpack(f"<{words}q", sha256(data).digest()[: 8 * words]))


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}q", *words)


def _damaged(what: str, rank: int) -> VerificationError:
    return VerificationError(
        f"{what} did not arrive as sent. Nothing of that message was handed to the engine, which must not generate before "
        "the next update. The wire or a device's memory corrupts data: update again, and replace the hardware if it comes "
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
