"""Compile what both sides hold into what each rank sends and receives.

The plan is pure arithmetic on published boxes: each rank computes it alone, all get the same, and a
digest proves it before the first byte moves. Its units, from small to large:

- a **segment** is one box of one weight that travels from one source to one destination;
- a **message** is a row of segments for one pair of ranks that fits its share of a bucket;
- in a **round** every pair exchanges at most one message, so staging never exceeds one bucket per
  direction and rank.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .errors import PlanError
from .layout import Box, coverage_gap, intersect, overlap, split, subtract, volume
from .manifest import Manifest, TensorSpec
from .routing import Holdings

# Every segment starts at a multiple of this many bytes, so that any dtype can be viewed in place
# and copies use the widest loads.
ALIGNMENT = 16
# Each message ends in one checksum of this many bytes.
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Segment:
    """One box of ``name`` at byte ``offset`` of its message, row-major."""

    name: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Message:
    """What ``source`` sends to ``destination`` in round ``round_index``.

    Attributes:
        nbytes: size on the wire; the last ``CHECKSUM_BYTES`` hold the checksum.
        payload_bytes: the bytes of the segments alone, without alignment and checksum.
    """

    source: int
    destination: int
    round_index: int
    segments: tuple[Segment, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        return sum(s.nbytes for s in self.segments)


@dataclass(frozen=True)
class Plan:
    """All messages of a refit's bulk path, in the order of rounds and ranks."""

    messages: tuple[Message, ...]
    rounds: int
    digest: str

    def sent_by(self, rank: int) -> list[list[Message]]:
        """Per round, the messages that ``rank`` sends."""
        return self._by_round(m for m in self.messages if m.source == rank)

    def received_by(self, rank: int) -> list[list[Message]]:
        """Per round, the messages that ``rank`` receives."""
        return self._by_round(m for m in self.messages if m.destination in (rank, EVERYONE))

    def _by_round(self, messages: Iterable[Message]) -> list[list[Message]]:
        rounds: list[list[Message]] = [[] for _ in range(self.rounds)]
        for message in messages:
            rounds[message.round_index].append(message)
        return rounds


# The destination of a message that is broadcast to all.
EVERYONE = -1


@dataclass(frozen=True)
class _Transfer:
    name: str
    box: Box
    itemsize: int


def compile_plan(
    manifest: Manifest,
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    bucket_bytes: int,
) -> Plan:
    """Intersect what destinations want with what sources hold, and pack it.

    Each wanted box is cut into pieces that one source holds; among the replicas of a piece the one
    that has the least to send so far is taken, so replicated weights are shared out.

    Args:
        manifest: the weights with their routes; only bulk ones are planned.
        sources: what each trainer rank holds.
        destinations: what each generation rank wants.
        bucket_bytes: staging memory for each direction on a rank, in bytes.

    Raises:
        PlanError: a wanted box that no source holds, two fragments of one rank that want the same
            box, or a bucket too small for one element from every peer; names the weight and the rank.
    """
    pairs = _assign(manifest, sources, destinations)
    fan_out: dict[int, int] = defaultdict(int)
    fan_in: dict[int, int] = defaultdict(int)
    for source, destination in pairs:
        fan_out[source] += 1
        fan_in[destination] += 1
    messages: list[Message] = []
    for (source, destination), transfers in sorted(pairs.items()):
        limit = bucket_bytes // max(fan_out[source], fan_in[destination])
        messages.extend(_pack(source, destination, transfers, limit, bucket_bytes))
    messages.sort(key=lambda m: (m.round_index, m.source, m.destination))
    rounds = 1 + max((m.round_index for m in messages), default=-1)
    return Plan(tuple(messages), rounds, _digest(messages))


def plan_broadcast(manifest: Manifest, sources: Sequence[Holdings], bucket_bytes: int) -> Plan:
    """The plan of the golden transport: every held box of a bulk weight goes once to everyone.

    The lowest rank that holds a box sends it; one message a round. Slow, and obviously right.
    """
    owned: dict[int, list[_Transfer]] = defaultdict(list)
    for spec in manifest.specs("bulk"):
        seen: set[Box] = set()
        for holdings in sources:
            for box in holdings.boxes.get(spec.name, ()):
                if box not in seen:
                    seen.add(box)
                    owned[holdings.rank].append(_Transfer(spec.name, box, spec.dtype.itemsize))
    packed = [
        message
        for source, transfers in sorted(owned.items())
        for message in _pack(source, EVERYONE, transfers, bucket_bytes, bucket_bytes)
    ]
    messages = tuple(replace(m, round_index=i) for i, m in enumerate(packed))
    return Plan(messages, len(messages), _digest(messages))


def _assign(
    manifest: Manifest, sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> dict[tuple[int, int], list[_Transfer]]:
    load: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for spec in manifest.specs("bulk"):
        holders: dict[Box, list[int]] = defaultdict(list)
        for holdings in sources:
            for box in holdings.boxes.get(spec.name, ()):
                holders[box].append(holdings.rank)
        for holdings in destinations:
            wanted = holdings.boxes.get(spec.name, [])
            _check_wanted(spec, wanted, holdings.rank, holders)
            for box in wanted:
                for piece, replicas in _cut(box, holders):
                    source = min(replicas, key=lambda r: (load[r], r))
                    load[source] += volume(piece) * spec.dtype.itemsize
                    pairs[source, holdings.rank].append(_Transfer(spec.name, piece, spec.dtype.itemsize))
    return pairs


def _check_wanted(spec: TensorSpec, wanted: list[Box], rank: int, holders: dict[Box, list[int]]) -> None:
    clash = overlap(wanted)
    if clash is not None:
        a, b = (wanted[i] for i in clash)
        raise PlanError(
            f"two fragments want {a} and {b}, which share elements; one storage would be filled from the other's "
            "half. Give each wanted box once, or send this weight over the misc path.",
            stage="plan",
            rank=rank,
            parameter=spec.name,
        )
    for box in wanted:
        gap = coverage_gap(box, holders)
        if gap is not None:
            raise PlanError(
                f"no trainer rank holds {gap} of the wanted box {box}; the engine would keep old bytes there. "
                "A shard rule leaves a hole: refuse the weight in the source so that it takes the misc path.",
                stage="plan",
                rank=rank,
                parameter=spec.name,
            )


def _cut(wanted: Box, holders: dict[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    """Disjoint pieces of ``wanted``, each with the ranks that hold it whole."""
    pieces: list[tuple[Box, list[int]]] = []
    open_boxes = [wanted]
    for held, ranks in sorted(holders.items()):
        rest: list[Box] = []
        for box in open_boxes:
            common = intersect(box, held)
            if common is None:
                rest.append(box)
            else:
                pieces.append((common, ranks))
                rest.extend(subtract(box, held))
        open_boxes = rest
        if not open_boxes:
            break
    return pieces


def _pack(
    source: int, destination: int, transfers: list[_Transfer], limit: int, bucket_bytes: int
) -> list[Message]:
    room = limit // ALIGNMENT * ALIGNMENT - CHECKSUM_BYTES
    if room < ALIGNMENT:
        raise PlanError(
            f"a bucket of {bucket_bytes} bytes leaves {limit} for the pair {source} → {destination}, too little for "
            "one element; raise policy.refit.bucket_mb",
            stage="plan",
        )
    messages: list[Message] = []
    segments: list[Segment] = []
    cursor = 0

    def close() -> None:
        nonlocal segments, cursor
        if segments:
            nbytes = _aligned(cursor) + CHECKSUM_BYTES
            messages.append(Message(source, destination, len(messages), tuple(segments), nbytes))
        segments, cursor = [], 0

    for transfer in transfers:
        for box in split(transfer.box, room // transfer.itemsize):
            nbytes = volume(box) * transfer.itemsize
            if _aligned(cursor) + nbytes > room:
                close()
            segments.append(Segment(transfer.name, box, _aligned(cursor), nbytes))
            cursor = _aligned(cursor) + nbytes
    close()
    return messages


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _digest(messages: Sequence[Message]) -> str:
    digest = hashlib.sha256()
    for m in messages:
        line = [
            m.source,
            m.destination,
            m.round_index,
            m.nbytes,
            [[s.name, s.box, s.offset] for s in m.segments],
        ]
        digest.update(json.dumps(line, separators=(",", ":")).encode())
    return digest.hexdigest()
