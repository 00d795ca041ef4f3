"""The bytes between a rank and the rendezvous: an opening that proves the token, then signed frames.

1. The server sends ``MAGIC``, its protocol version and a nonce.
2. The client answers with its protocol version, a nonce, its rank, its role and a proof: an HMAC-SHA256 of all of that
   under the token. These two messages keep their form in all versions.
3. The server sends its own proof. Whoever does not hold the token has been refused by now, on both sides.
4. Frames: body length (u32), signature (keyed BLAKE2b of 16 bytes), body. Each direction has a key of its own,
   derived from the token and both nonces, and the signature covers the frame's number, its length and the body, so
   that nothing can be replayed, dropped or moved to another connection. A long body is signed by its SHA-256, so that
   an answer to all ranks is hashed once.

A body is a code (u8) and fields (u32 length and bytes each). Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

MAGIC = b"rlrefit"
# Raised with every change to what ranks tell each other, and to what each of them computes that must be alike on all.
PROTOCOL_VERSION = 11
NONCE_BYTES = 16
PROOF_BYTES = 32
_GREETING = struct.Struct(f"<{len(MAGIC)}sB{NONCE_BYTES}s")
# In the place of the rank of a process that was given none.
NO_RANK = 0xFFFFFFFF
GREETING_BYTES = _GREETING.size
_HELLO = struct.Struct(f"<B{NONCE_BYTES}sIB{PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
_SIGNATURE_BYTES = 16
_HEADER = struct.Struct(f"<I{_SIGNATURE_BYTES}s")
_NUMBER = struct.Struct("<QI")
# A second hash of what is shorter costs more than it spares.
_HASH_ABOVE = 512
HEADER_BYTES = _HEADER.size
# Of what one rank tells, as it travels and as it unpacks; and of an answer, which holds what all ranks told.
MAX_MESSAGE = 64 << 20
MAX_ANSWER = 256 << 20
MAX_FIELDS = 1 << 20
# A rank compresses what is long on its own; short values are compressed together, since all ranks tell alike.
_COMPRESS_ABOVE = 16 << 10
_COMPRESS_TABLE_ABOVE, _COMPRESS_TABLE_BELOW = 512, 4 << 20
_ZLIB_HEADER = b"\x78"  # no JSON begins so
# Seconds for which a rank that meets the others looks for the answer without a pause, and the server for those that are still to come. To
# wake an idle core takes about as long as all that a meeting computes.
SPIN_S = 2e-3
# json.dumps would make an encoder for each call.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Malformed(ValueError):
    """Bytes that no rank of this world would send."""


class Role(IntEnum):
    """What a connection is for: the end of a rank's ``MEMBER`` connection is the end of the rank."""

    MEMBER = 0
    GROUP_STORE = 1


class Op(IntEnum):
    """Requests, with their fields."""

    MEET = (
        1  # topic, milliseconds, compare?, flags (u8), ranks that get direct data, the data…, values for all…
    )
    ABORT = 2  # reason; of what only may follow from another rank's end also milliseconds to wait for that
    CAUSE = 3  # milliseconds; why the epoch ends; a rank asks that has given up
    LOOK = 4  # whether a rank has given up
    LEAVE = 5
    SET = 6  # key, value
    GET = 7  # key, milliseconds
    WAIT = 8  # milliseconds, keys…
    CHECK = 9  # keys…
    ADD = 10  # key, amount
    DELETE = 11  # key


class Status(IntEnum):
    """Answers, with their fields."""

    OK = 1  # as the request has it; of a meeting that does not compare: all values, who sent direct data, the data…
    DIFFER = 2  # all values: a comparing meeting had different ones
    ABORTED = 3  # rank that is to blame or -1, a sentence
    TIMEOUT = 4  # at a meeting: a missing rank, and the names of all that are missing
    REFUSED = 5  # why


def pack_greeting(nonce: bytes) -> bytes:
    """What a server says first."""
    return _GREETING.pack(MAGIC, PROTOCOL_VERSION, nonce)


def unpack_greeting(greeting: bytes) -> tuple[int, bytes]:
    """(Protocol version, nonce) of a server.

    Raises:
        Malformed: it is no rendezvous of rlrefit.
    """
    magic, version, nonce = _GREETING.unpack(greeting)
    if magic != MAGIC:
        raise Malformed("what listens there is no rendezvous of rlrefit")
    return version, nonce


def proof(
    key: bytes,
    label: bytes,
    server_nonce: bytes,
    client_nonce: bytes,
    rank: int,
    role: int,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """HMAC-SHA256 under the token of who is opening which connection; ``label`` tells the two sides apart."""
    said = struct.pack("<BIB", version, rank, role)
    return hmac.digest(key, label + server_nonce + client_nonce + said, "sha256")


def pack_hello(
    key: bytes,
    server_nonce: bytes,
    client_nonce: bytes,
    rank: int,
    role: Role,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """A client's opening."""
    given = proof(key, b"client", server_nonce, client_nonce, rank, role, version)
    return _HELLO.pack(version, client_nonce, rank, role, given)


def check_proof(
    given: bytes, key: bytes, server_nonce: bytes, client_nonce: bytes, rank: int, role: Role
) -> bool:
    """Whether a server's proof is one."""
    return hmac.compare_digest(given, proof(key, b"server", server_nonce, client_nonce, rank, role))


def check_hello(key: bytes, server_nonce: bytes, hello: bytes) -> tuple[int, bytes, int, Role]:
    """(Client's protocol version, nonce, rank, role) of an opening.

    Raises:
        Malformed: it does not prove the token, or is not an opening.
    """
    version, client_nonce, rank, role, given = _HELLO.unpack(hello)
    expected = proof(key, b"client", server_nonce, client_nonce, rank, role, version)
    if not hmac.compare_digest(given, expected):
        raise Malformed("it does not hold this rendezvous' token")
    try:
        return version, client_nonce, rank, Role(role)
    except ValueError:
        raise Malformed(f"role {role} is unknown") from None


class Body(bytes):
    """A body that many may get: its digest is computed once."""

    @cached_property
    def digest(self) -> bytes:
        """SHA-256."""
        return hashlib.sha256(self).digest()


class Signer:
    """Signs and checks the frames of one direction of one connection, in their order."""

    def __init__(self, key: bytes, direction: bytes, server_nonce: bytes, client_nonce: bytes):
        key = hmac.digest(key, b"frames " + direction + server_nonce + client_nonce, "sha256")
        # Copied for each frame. OpenSSL's HMAC takes four times as long where nothing of it is in a cache, as at a refit's meetings.
        self._keyed = hashlib.blake2b(key=key, digest_size=_SIGNATURE_BYTES)
        self._count = 0

    def header(self, body: Body) -> bytes:
        """What goes before the body in the next frame to send."""
        return _HEADER.pack(len(body), self._next_signature(body))

    def frame(self, body: Body) -> bytes:
        """The next frame to send."""
        return self.header(body) + body

    def check(self, signature: bytes, body: Body) -> None:
        """Accept the next frame that came.

        Raises:
            Malformed: it is not the next one that the peer signed.
        """
        if not hmac.compare_digest(signature, self._next_signature(body)):
            raise Malformed("its signature is wrong: the bytes were changed, replayed or lost on the way")

    def _next_signature(self, body: Body) -> bytes:
        self._count += 1
        signing = self._keyed.copy()
        signing.update(_NUMBER.pack(self._count, len(body)))
        signing.update(body if len(body) <= _HASH_ABOVE else body.digest)
        return signing.digest()


def parse_header(header: bytes, most: int) -> tuple[int, bytes]:
    """(Length of the body, signature).

    Raises:
        Malformed: the body would be larger than ``most`` bytes.
    """
    length, signature = _HEADER.unpack(header)
    if length > most:
        raise Malformed(f"a message of {length} bytes is above the limit of {most}")
    return length, signature


def pack_body(code: int, fields: Sequence[bytes] = ()) -> Body:
    """A body of ``code`` and ``fields``."""
    parts = [bytes((code,))]
    for field in fields:
        parts += (len(field).to_bytes(4, "little"), field)
    return Body(b"".join(parts))


def unpack_body(body: bytes) -> tuple[int, list[bytes]]:
    """Inverse of :func:`pack_body`.

    Raises:
        Malformed: lengths and bytes do not fit, or there are too many fields.
    """
    if not body:
        raise Malformed("an empty message")
    fields: list[bytes] = []
    cursor, end = 1, len(body)
    while cursor < end:
        start = cursor + 4
        cursor = start + int.from_bytes(body[cursor:start], "little")
        if start > end or cursor > end or len(fields) == MAX_FIELDS:
            raise Malformed("its fields do not fill it")
        fields.append(body[start:cursor])
    return body[0], fields


def pack_values(rows: Sequence[Sequence[bytes]]) -> bytes:
    """What each rank told: where its values stand in a table, and the table of all different ones.

    Equal values are told once, and short ones compressed together.
    """
    places: dict[bytes, int] = {}
    numbers: list[int] = []
    for row in rows:
        numbers.append(len(row))
        numbers += [places.setdefault(value, len(places)) for value in row]
    packed: bytes = pack_body(0, [pack_numbers(numbers), *places])
    return (
        zlib.compress(packed, 1) if _COMPRESS_TABLE_ABOVE < len(packed) <= _COMPRESS_TABLE_BELOW else packed
    )


def unpack_values(packed: bytes) -> tuple[list[list[int]], list[bytes]]:
    """Inverse of :func:`pack_values`: for each rank the places of its values, and the table of values.

    Raises:
        Malformed: it is no such answer.
    """
    compressed = packed.startswith(_ZLIB_HEADER)
    _, fields = unpack_body(_inflated(packed, _COMPRESS_TABLE_BELOW) if compressed else packed)
    if not fields:
        raise Malformed("no table of values")
    numbers, table = unpack_numbers(fields[0]), fields[1:]
    rows: list[list[int]] = []
    cursor = 0
    while cursor < len(numbers):
        start = cursor + 1
        cursor = start + numbers[cursor]
        rows.append(numbers[start:cursor])
        if cursor > len(numbers) or any(place >= len(table) for place in rows[-1]):
            raise Malformed("a value that is not in the table")
    return rows, table


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Words of 32 bits, little-endian."""
    if not numbers:
        return b""
    words = array("I", numbers)
    if sys.byteorder != "little":
        words.byteswap()
    return words.tobytes()


def unpack_numbers(field: bytes) -> list[int]:
    """Inverse of :func:`pack_numbers`.

    Raises:
        Malformed: not whole words.
    """
    if not field:
        return []
    if len(field) % 4:
        raise Malformed(f"words of {len(field)} bytes")
    words = array("I", field)
    if sys.byteorder != "little":
        words.byteswap()
    return words.tolist()


def pack_int(value: int) -> bytes:
    """Eight bytes, little-endian, signed."""
    return value.to_bytes(8, "little", signed=True)


def unpack_int(field: bytes) -> int:
    """Inverse of :func:`pack_int`.

    Raises:
        Malformed: not eight bytes.
    """
    if len(field) != 8:
        raise Malformed(f"a number of {len(field)} bytes")
    return int.from_bytes(field, "little", signed=True)


def pack_wait(seconds: float) -> bytes:
    """A limit as it travels: whole milliseconds, at least one."""
    return pack_int(max(1, int(seconds * 1e3)))


def pack_json(data: Any) -> bytes:
    """JSON, compressed if it is long.

    Raises:
        Malformed: the JSON is larger than ``MAX_MESSAGE``.
    """
    raw = _to_json(data).encode()
    if len(raw) > MAX_MESSAGE:
        raise Malformed(f"data of {len(raw)} bytes is above the limit of {MAX_MESSAGE}")
    return zlib.compress(raw, 1) if len(raw) > _COMPRESS_ABOVE else raw


def unpack_json(packed: bytes) -> Any:
    """Inverse of :func:`pack_json`; never unpacks more than ``MAX_MESSAGE`` bytes.

    Raises:
        Malformed: not JSON or compressed JSON, or larger than allowed.
    """
    raw = _inflated(packed, MAX_MESSAGE) if packed.startswith(_ZLIB_HEADER) else packed
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON: {error}") from error


def _inflated(packed: bytes, most: int) -> bytes:
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(packed, most)
    except zlib.error as error:
        raise Malformed(f"it does not unpack: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise Malformed(f"it is cut short, unpacks to more than {most} bytes, or more stands behind it")
    return raw
