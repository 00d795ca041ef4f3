"""Before a layout's first transfer its ranks compare what they were called with, over the transfer's own group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..comm.exchanges import Parcel
from ..comm.torch_group import Group
from ..errors import RefitMismatch
from .reshard import Side

# A rank's statement as zero-padded JSON. No multiple of 16 bytes, so that it never has a message's size.
RECORD_BYTES = 2040
_STAGE = "agreement"


@dataclass(frozen=True)
class Statement:
    """What one rank was called with.

    Attributes:
        arguments: name of an argument that all ranks must pass alike → its digest or text.
        dtype: name of the local tensors' dtype.
        shapes: shape of the local source and of the local destination; None where there is none.
        turn: where the rank would have sampled checks begin; the first rank's counts.
    """

    arguments: dict[str, str]
    dtype: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    turn: int

    def pack(self) -> bytes:
        """As JSON.

        Raises:
            ValueError: longer than a record; a tensor of some hundred dimensions.
        """
        raw = json.dumps([self.arguments, self.dtype, self.shapes, self.turn], separators=(",", ":")).encode()
        if len(raw) > RECORD_BYTES:
            raise ValueError(
                f"the tensors' shapes {self.shapes} can't be told to the other ranks in {RECORD_BYTES} bytes"
            )
        return raw

    @staticmethod
    def unpack(raw: bytes, rank: int) -> Statement:
        """Inverse of :meth:`pack`; ``rank`` is the peer that said it.

        Raises:
            RefitMismatch: it is none.
        """
        try:
            arguments, dtype, shapes, turn = json.loads(raw.rstrip(b"\0"))
            if not isinstance(arguments, dict) or len(shapes) != 2 or type(turn) is not int or turn < 0:
                raise TypeError("other fields")
            read = [None if s is None else tuple(int(n) for n in s) for s in shapes]
            return Statement(
                {str(k): str(v) for k, v in arguments.items()}, str(dtype), (read[0], read[1]), turn
            )
        except (ValueError, TypeError) as error:
            raise RefitMismatch(
                f"rank {rank} sent no statement of its arguments but something else ({error}); nothing was written. All "
                "ranks of both meshes must call xferdtensor in the same order, with the same rlrefit",
                stage=_STAGE,
                rank=rank,
            ) from error


def digest_of(side: Side) -> tuple[str, str]:
    """Short digests of a side's mesh and of its placements."""
    return _short(repr((side.mesh.shape, side.mesh.ranks))), _short(repr(side.placements))


def gather(group: Group, members: Sequence[int], raw: bytes) -> list[bytes]:
    """Give every member all members' records, in the order of ``members``.

    The first member collects and passes on, so that members need no connections but to it.

    Raises:
        PeerLost, RefitTimeout: a member did not take part.
    """
    own = torch.frombuffer(bytearray(raw.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8).to(group.device)
    everyone = torch.zeros(len(members), RECORD_BYTES, dtype=torch.uint8, device=group.device)
    root = members[0]
    others = list(members[1:])
    group.connect(others if group.rank == root else [root])
    if group.rank == root:
        everyone[0] = own
        group.exchange([], [Parcel(r, everyone[i]) for i, r in enumerate(others, 1)], _STAGE)
        flat = everyone.view(-1)
        group.exchange([Parcel(r, flat) for r in others], [], _STAGE)
    else:
        group.exchange([Parcel(root, own)], [], _STAGE)
        group.exchange([], [Parcel(root, everyone.view(-1))], _STAGE)
    return [bytes(row.tolist()) for row in everyone.cpu()]


def compare(statements: Mapping[int, Statement], own: int) -> None:
    """Check that all ranks were called alike.

    Args:
        statements: of every member, by rank.
        own: this rank.

    Raises:
        RefitMismatch: names the first argument and the rank that differ from the first rank's.
    """
    first = min(statements)
    for rank, statement in sorted(statements.items()):
        for name in sorted({*statement.arguments, *statements[first].arguments}):
            ours, theirs = statements[first].arguments.get(name), statement.arguments.get(name)
            if ours != theirs:
                raise RefitMismatch(
                    f"{name} differs: {ours} on rank {first}, {theirs} on rank {rank}; bytes would land in the wrong "
                    "place, so nothing was written. Give all ranks of both meshes the same",
                    stage=_STAGE,
                    rank=own,
                )
        if statement.dtype != statements[first].dtype:
            raise RefitMismatch(
                f"rank {first} has {statements[first].dtype} and rank {rank} has {statement.dtype}; bytes would be read "
                "as other numbers, so nothing was written. Cast before the transfer",
                stage=_STAGE,
                rank=own,
            )


def agree_on_digest(group: Group, members: Sequence[int], digest: str) -> None:
    """Check that all members compiled the same plan.

    Raises:
        RefitMismatch: they did not.
    """
    for rank, raw in zip(members, gather(group, members, digest.encode()), strict=True):
        if raw.rstrip(b"\0").decode(errors="replace") != digest:
            raise RefitMismatch(
                f"rank {rank} compiled another plan from the same arguments; nothing was written. Do both run the same "
                "rlrefit?",
                stage=_STAGE,
                rank=group.rank,
            )


def local_shapes(
    statements: Mapping[int, Statement], side: Side, which: int, own: int
) -> dict[int, tuple[int, ...]]:
    """Local shapes of one side (0 source, 1 destination) by rank.

    Raises:
        RefitMismatch: a rank of the mesh said none.
    """
    found: dict[int, tuple[int, ...]] = {}
    for rank in side.mesh.ranks:
        shape = statements[rank].shapes[which]
        if shape is None:
            raise RefitMismatch(
                f"rank {rank} is in the mesh of {'src' if which == 0 else 'dst'} but gave no tensor; nothing was written",
                stage=_STAGE,
                rank=own,
            )
        found[rank] = shape
    return found


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
