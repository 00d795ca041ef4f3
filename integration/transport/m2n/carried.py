"""What of a plan ``nccl.m2n`` carries, in which batches, and what is left to ``p2p``: pure arithmetic, alike on all ranks."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ...layout import Box
from ...plan import CHECKSUM_BYTES, Message, Plan, Segment, aligned
from ...weights.manifest import TensorSpec
from ..whole_tensors import WholeTensor, whole_tensors
from .meshes import MeshTransfer, mesh_transfer

# Calls of CUDA that the library makes for one batch at most. A few batches are ahead of the GPU, whose queues hold some thousand
# calls: one more would block without a limit of time, and with it all that asks the driver.
_MOST_CALLS = 128
# Reasons that a remark names.
_NAMED_REASONS = 3

# Ranks that hold or want boxes of a weight.
_Boxes = Mapping[str, Mapping[int, Sequence[Box]]]


@dataclass(frozen=True)
class Carried:
    """What ``nccl.m2n`` carries of a refit, and what it leaves.

    Attributes:
        batches: what is handed to the library together, in order: transfers of like meshes, of no more than a bucket's bytes
            on any rank.
        names: weights that go so.
        nbytes: of those weights.
        left: reasons why others don't, with the number of weights and their bytes.
    """

    batches: tuple[tuple[MeshTransfer, ...], ...]
    names: frozenset[str]
    nbytes: int
    left: tuple[tuple[str, int, int], ...]

    @property
    def digest(self) -> str:
        """Of all that ranks have to compute alike."""
        told = [[(t.tensor.label, t.source, t.destination) for t in batch] for batch in self.batches]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    @property
    def remark(self) -> str:
        """How many weights and bytes go which way, and why not all by the library."""
        told = f"nccl.m2n carries {len(self.names)} weights ({self.nbytes / 1e6:.1f} MB)"
        if not self.left:
            return told
        weights = sum(count for _, count, _ in self.left)
        nbytes = sum(nbytes for _, _, nbytes in self.left)
        reasons = [f"{count} since {reason}" for reason, count, _ in self.left[:_NAMED_REASONS]]
        more = " …" if len(self.left) > _NAMED_REASONS else ""
        return f"{told}, and p2p {weights} ({nbytes / 1e6:.1f} MB): {'; '.join(reasons)}{more}"


@dataclass(frozen=True)
class ReshardPlan(Plan):
    """One rank's plan, of which ``nccl.m2n`` carries a part.

    The messages are those that ``p2p`` would send of all weights. For what the library carries they say who compares which
    checksums with whom.

    Attributes:
        carried: the same on all ranks.
    """

    carried: Carried = Carried((), frozenset(), 0, ())

    @classmethod
    def of(cls, plan: Plan, carried: Carried) -> ReshardPlan:
        """The same plan."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(Plan)}, carried=carried)

    def of_carried(self) -> Plan:
        """What the library carries."""
        return _part(self, self.carried.names.__contains__)

    def of_rest(self) -> Plan:
        """What ``p2p`` carries."""
        return _part(self, lambda name: name not in self.carried.names)


def carry(
    specs: Sequence[TensorSpec],
    sources: _Boxes,
    destinations: _Boxes,
    unfit: Mapping[str, str],
    bucket_bytes: int,
) -> Carried:
    """Choose what ``nccl.m2n`` carries.

    Args:
        specs: the weights of the bulk path, in order.
        sources: weight → trainer rank → boxes that it holds.
        destinations: weight → engine rank → boxes that it wants.
        unfit: weights that it can't carry for other reasons than their shapes, with the reasons.
        bucket_bytes: the most that a batch takes on any rank. The library stages so much, too.
    """
    fitting: list[MeshTransfer] = []
    left: Counter[str] = Counter()
    left_bytes: Counter[str] = Counter()
    # Layers are cut alike.
    known: dict[tuple[object, ...], MeshTransfer | str] = {}
    tensors = whole_tensors(specs, sources, destinations)
    for tensor in tensors:
        reason = next((unfit[name] for name in tensor.names if name in unfit), "")
        like = tensor.shape, tensor.dtype, id(tensor.sources), id(tensor.destinations)
        if not reason and like not in known:
            known[like] = _fitting(tensor, bucket_bytes)
        found = reason or known[like]
        if isinstance(found, str):
            left[found] += len(tensor.names)
            left_bytes[found] += tensor.nbytes
        else:
            fitting.append(replace(found, tensor=tensor))
    return Carried(
        tuple(batches(fitting, bucket_bytes)),
        frozenset(name for transfer in fitting for name in transfer.tensor.names),
        sum(transfer.tensor.nbytes for transfer in fitting),
        tuple((reason, count, left_bytes[reason]) for reason, count in left.most_common()),
    )


def batches(transfers: Sequence[MeshTransfer], bucket_bytes: int) -> list[tuple[MeshTransfer, ...]]:
    """Put together what the library can join: transfers of like meshes, one after another, as far as a bucket holds them.

    Args:
        transfers: none is larger than a bucket on any rank.
        bucket_bytes: of a batch on any rank.
    """
    alike: dict[tuple[object, ...], list[MeshTransfer]] = defaultdict(list)
    for transfer in transfers:
        alike[transfer.topology].append(transfer)
    found: list[tuple[MeshTransfer, ...]] = []
    for members in alike.values():
        held: list[MeshTransfer] = []
        for transfer in members:
            if held and not _fits_together([*held, transfer], bucket_bytes):
                found.append(tuple(held))
                held = []
            held.append(transfer)
        found.append(tuple(held))
    return found


def _fits_together(held: Sequence[MeshTransfer], bucket_bytes: int) -> bool:
    sides = (sum(aligned(t.source_bytes) for t in held), sum(aligned(t.destination_bytes) for t in held))
    return max(sides) <= bucket_bytes and sum(t.calls for t in held) <= _MOST_CALLS


def _fitting(tensor: WholeTensor, bucket_bytes: int) -> MeshTransfer | str:
    found = mesh_transfer(tensor)
    if isinstance(found, MeshTransfer) and max(found.source_bytes, found.destination_bytes) > bucket_bytes:
        return f"a rank's part is larger than policy.refit.bucket_mb ({bucket_bytes >> 20} MiB)"
    return found


def _part(plan: Plan, wanted: Callable[[str], bool]) -> Plan:
    """The part of a rank's plan that is about some weights; rounds without any are left out."""
    kept: list[tuple[tuple[Message, ...], tuple[Message, ...]]] = []
    for sends, receives in zip(plan.sends, plan.receives, strict=True):
        both = _some_of(sends, wanted), _some_of(receives, wanted)
        if any(both):
            kept.append(both)
    return Plan(
        plan.rank,
        tuple(sends for sends, _ in kept),
        tuple(receives for _, receives in kept),
        plan.digest,
        plan.pair_digests,
        plan.pace,
    )


def _some_of(messages: Collection[Message], wanted: Callable[[str], bool]) -> tuple[Message, ...]:
    found = [_narrowed(message, [s for s in message.segments if wanted(s.name)]) for message in messages]
    return tuple(message for message in found if message is not None)


def _narrowed(message: Message, segments: Sequence[Segment]) -> Message | None:
    """The message with some of its segments alone, one behind another."""
    if len(segments) == len(message.segments):
        return message
    if not segments:
        return None
    placed: list[Segment] = []
    cursor = 0
    for segment in segments:
        placed.append(segment._replace(offset=cursor))
        cursor = aligned(cursor + segment.nbytes)
    return replace(message, segments=tuple(placed), nbytes=cursor + CHECKSUM_BYTES)
