"""``xferdtensor``: move one tensor from one mesh of ranks to another."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..comm.group import Group, PeerBuffer
from ..config import require_equal_settings
from ..control.decoding import decode
from ..errors import RefitMismatch, TransportUnavailable
from ..layout import Mesh, boxes_of, layout_of, local_shape, mesh_of, placements_of
from ..packing import repeats
from ..transport import TransferResult
from ..weights.manifest import dtype_name
from .cache import Request, Transfers
from .reshard import Side, full_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TRANSPORTS = ("p2p", "m2n", "golden")
# No multiple of 16 bytes, so that what ranks tell each other never has a message's size.
_RECORD_BYTES = 2040
_STAGE = "agreement"
# Of what a rank says that it lacks.
_LACKS_CHARACTERS = 400
# Of the number from which a layout's sampled checks count: far more than any pair has messages.
_TURN_BITS = 48


@dataclass(frozen=True)
class _End:
    """One side as this rank sees it: the layout, and its own local tensor if it has one."""

    name: str
    side: Side
    local: torch.Tensor | None
    full_shape: tuple[int, ...] | None


@dataclass(frozen=True)
class _Arguments:
    """What ranks tell each other of a call.

    Attributes:
        settings: the same on all.
        shapes: of the local tensors, by ``src`` and ``dst``.
        turn: where the rank would have sampled checks begin; the first rank's counts.
        lacks: what it lacks for the transport.
    """

    settings: Mapping[str, object]
    shapes: dict[str, tuple[int, ...]]
    turn: int
    lacks: str = ""

    def __post_init__(self) -> None:
        if self.turn < 0:
            raise ValueError(f"sampled checks begin at {self.turn}")


def xferdtensor(
    src: torch.Tensor | None,
    src_mesh: Mesh | DeviceMesh | Sequence[Any] | None,
    src_placements: Sequence[object] | None,
    dst: torch.Tensor | None,
    dst_mesh: Mesh | DeviceMesh | Sequence[Any] | None,
    dst_placements: Sequence[object] | None,
    process_group: dist.ProcessGroup | Group,
    stream: torch.cuda.Stream | None = None,
    *,
    shape: Sequence[int] | None = None,
    transport: str = "p2p",
    bucket_bytes: int = 256 << 20,
    verify: str = "sampled",
    timeout_s: float = 300.0,
) -> TransferResult:
    """Write into ``dst`` what ``src`` holds, each with its own mesh and placements.

    A collective of the ranks of both meshes, which pass the same meshes, placements and options in the same order of
    calls; other ranks of the group may call it and return at once. The first call of a layout compares all of that on
    all ranks and compiles the transfer; later ones replay it. With ``shape`` they do so without another word between
    the ranks; without it the local shapes, and so the full one, are told at each call.

    Args:
        src: this rank's local tensor, any strides; a DTensor; or None on a rank that is not in ``src_mesh``.
        src_mesh: nested lists of ranks or a :class:`~.layout.Mesh`, in ``process_group``'s ranks; or a ``DeviceMesh``,
            whose ranks are those of the default process group. None with a DTensor takes its own.
        src_placements: for each mesh dimension ``Shard``, ``Replicate`` or ``StridedShard``, ours or torch's. Shards
            may be uneven or empty, as ``torch.chunk`` cuts. None with a DTensor takes its own.
        dst: as ``src``; it is written, and must not overlap ``src`` in memory.
        dst_mesh: as ``src_mesh``. The meshes may share ranks; what such a rank has itself is copied in place.
        dst_placements: as ``src_placements``.
        process_group: of all ranks, NCCL for CUDA tensors and gloo for CPU ones; a torch ``ProcessGroup`` or a
            :class:`~..comm.group.Group`.
        stream: CUDA stream on which ``src`` is ready, and on which ``dst`` may be used after the call; None for
            the current one. The call returns when the exchange has ended.
        shape: of the full tensor, given on all ranks or on none.
        transport: ``p2p``; ``m2n``, by which NVIDIA's ``nccl.m2n`` moves what even meshes of ranks in a row express, and ``p2p``
            the rest; or ``golden`` (every part is broadcast to all ranks of the group: slow, the oracle). For ``m2n`` and ``golden``
            the meshes hold all ranks of the group. What ``m2n`` opens for a group, with memory of ``bucket_bytes``, stays open until
            the process ends, and no later call of the process can have more.
        bucket_bytes: staging memory for each of at most two buckets a direction.
        verify: ``off``, ``sampled`` (one message of each pair of ranks a call, another one each time) or ``full``: checksums
            of sent and landed bytes.
        timeout_s: limit of any wait, in seconds.

    Returns:
        Bytes that this rank sent or received (what it copied in place is not among them), and how many were verified.

    Raises:
        ValueError: arguments that are wrong on their own. Other ranks then wait until their timeout.
        RefitMismatch: the ranks were called differently; on all of them, before anything is written.
        TransportUnavailable: a rank can't use ``nccl.m2n``, or not with so many ``bucket_bytes``, and why; on all of them, before anything is written.
        PlanError: ``bucket_bytes`` is too small for one element from every peer.
        RefitTimeout, PeerLost, VerificationError: ``dst`` may be written in part then.
    """
    _check_options(transport, verify)
    source = _end("src", src, src_mesh, src_placements, process_group)
    destination = _end("dst", dst, dst_mesh, dst_placements, process_group)
    rank = process_group.rank if isinstance(process_group, Group) else process_group.rank()
    size = process_group.size if isinstance(process_group, Group) else process_group.size()
    members = sorted({*source.side.mesh.ranks, *destination.side.mesh.ranks})
    _check_members(members, size, transport)
    _check_own(rank, source, destination)
    if rank not in members:
        return TransferResult(0, 0)
    local = next(end.local for end in (source, destination) if end.local is not None)
    for end in (source, destination):
        # Raises for placements that don't fit: here, and not when the other ranks wait already.
        boxes_of(local.shape, end.side.mesh, end.side.placements, rank)
    transfers = Transfers.of(process_group, local.device, timeout_s)
    request = Request(
        source.side,
        destination.side,
        _given_shape(shape, source, destination),
        local.dtype,
        transport,
        bucket_bytes,
        verify,
    )
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        if request.shape is None or not transfers.agreed(request):
            request = _agree(transfers, request, members, source, destination)
        _check_local_shapes(rank, request.full_shape, source, destination)
        held = source.local
        # What memory holds travels, and of a lazy conjugate or negative these are other values.
        return transfers.run(
            request, None if held is None else held.resolve_conj().resolve_neg(), destination.local
        )


def _check_options(transport: str, verify: str) -> None:
    if transport not in _TRANSPORTS:
        raise ValueError(
            f"xferdtensor has no transport {transport!r}; use p2p, m2n or golden. (ipc needs storage that is told "
            "to the peers once for many transfers: a refit session does that.)"
        )
    if verify not in ("off", "sampled", "full"):
        raise ValueError(f"verify={verify!r}; use off, sampled or full")


def _end(
    name: str,
    tensor: torch.Tensor | None,
    mesh: Mesh | DeviceMesh | Sequence[Any] | None,
    placements: Sequence[object] | None,
    process_group: dist.ProcessGroup | Group,
) -> _End:
    from torch.distributed.tensor import DTensor

    local, shape = tensor, None
    found: Mesh | DeviceMesh | Sequence[Any] | None = mesh
    if isinstance(tensor, DTensor):
        local, shape = tensor.to_local(), tuple(tensor.shape)
        own_mesh, own_placements = layout_of(tensor)
        found = tensor.device_mesh if mesh is None else mesh
        if placements is None:
            placements = own_placements
        if placements_of(placements) != own_placements:
            raise ValueError(
                f"{name} is a DTensor with placements {own_placements}, but {name}_placements is {placements}; leave "
                "them out, or give the DTensor's local tensor"
            )
        if _group_mesh(name, found, process_group) != _group_mesh(name, tensor.device_mesh, process_group):
            raise ValueError(f"{name} is a DTensor on the mesh {own_mesh}, but {name}_mesh is {mesh}")
        if own_mesh.coordinate(dist.get_rank()) is None:
            local = None
    if found is None or placements is None:
        raise ValueError(
            f"{name}_mesh and {name}_placements are needed on every rank: only a DTensor brings its own, and the other "
            "side's ranks have none"
        )
    return _End(
        name,
        Side(_group_mesh(name, found, process_group), placements_of(placements)),
        local.detach() if local is not None else None,
        shape,
    )


def _group_mesh(name: str, mesh: Any, process_group: dist.ProcessGroup | Group) -> Mesh:
    """The mesh in the process group's ranks, without names."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.shape, mesh.ranks)
    if isinstance(mesh, Sequence):
        return Mesh.of(mesh)
    if isinstance(process_group, Group):
        raise ValueError(
            f"{name}_mesh is a DeviceMesh, which counts ranks as the default process group does; {process_group!r} "
            "counts its own. Give nested lists of its ranks"
        )
    found = mesh_of(mesh)
    return Mesh(found.shape, tuple(dist.get_group_rank(process_group, rank) for rank in found.ranks))


def _check_members(members: Sequence[int], size: int, transport: str) -> None:
    if members[-1] >= size:
        raise ValueError(f"mesh rank {members[-1]} is not in the process group of {size} ranks")
    if transport in ("golden", "m2n") and len(members) != size:
        raise ValueError(
            f"{transport} takes all {size} ranks of the process group, but ranks "
            f"{sorted(set(range(size)) - set(members))} are in neither mesh; use p2p, or a group of the meshes' ranks"
        )


def _check_own(rank: int, source: _End, destination: _End) -> None:
    """Check this rank's own tensors."""
    for end in (source, destination):
        inside = end.side.mesh.coordinate(rank) is not None
        if inside and end.local is None:
            raise ValueError(
                f"rank {rank} is in {end.name}_mesh, but {end.name} is None; give its local tensor"
            )
        if not inside and end.local is not None:
            raise ValueError(f"rank {rank} is not in {end.name}_mesh, but {end.name} is given; pass None")
    if destination.local is not None:
        _check_writable(rank, destination.local)
    if source.local is not None and destination.local is not None:
        if source.local.device != destination.local.device:
            raise ValueError(
                f"src is on {source.local.device} and dst on {destination.local.device} of rank {rank}; both must be on "
                "the device that the process group serves"
            )
        if source.local.dtype != destination.local.dtype:
            raise ValueError(
                f"src is {dtype_name(source.local.dtype)} and dst {dtype_name(destination.local.dtype)} on rank {rank}; "
                "bytes would be read as other numbers. Cast before the transfer"
            )
        if _overlap(source.local, destination.local):
            raise ValueError(
                f"src and dst of rank {rank} overlap in memory; parts would be overwritten before they are read. Give "
                "dst memory of its own"
            )


def _check_writable(rank: int, local: torch.Tensor) -> None:
    if local.is_conj() or local.is_neg():
        raise ValueError(
            f"dst of rank {rank} is a lazy conjugate or negative, whose memory would hold other values than come. Give the "
            "tensor whose conjugate or negative it is, or memory of its own"
        )
    if repeats(local.shape, local.stride()):
        raise ValueError(
            f"dst of rank {rank} is expanded: several of its elements share one place, and would keep the last of their values. "
            "Give dst memory of its own"
        )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if not a.numel() or not b.numel():
        return False
    return a.data_ptr() < b.data_ptr() + _extent(b) and b.data_ptr() < a.data_ptr() + _extent(a)


def _extent(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _given_shape(shape: Sequence[int] | None, source: _End, destination: _End) -> tuple[int, ...] | None:
    if shape is None:
        return None
    given = tuple(int(n) for n in shape)
    for end in (source, destination):
        if end.full_shape is not None and end.full_shape != given:
            raise ValueError(f"shape is {given}, but {end.name} is a DTensor of shape {end.full_shape}")
    return given


def _agree(
    transfers: Transfers, request: Request, members: Sequence[int], source: _End, destination: _End
) -> Request:
    """Compare what all ranks were called with, and complete the request with the full shape."""
    group = transfers.group
    settings = {
        **{
            f"{end.name}_mesh": _digest((end.side.mesh.shape, end.side.mesh.ranks))
            for end in (source, destination)
        },
        **{f"{end.name}_placements": _digest(end.side.placements) for end in (source, destination)},
        "shape": request.shape,
        "dtype": dtype_name(request.dtype),
        "transport": request.transport,
        "bucket_bytes": request.bucket_bytes,
        "verify": request.verify,
        "timeout_s": group.timeout_s,
    }
    local = {end.name: tuple(end.local.shape) for end in (source, destination) if end.local is not None}
    lacks = transfers.lacks(request)[:_LACKS_CHARACTERS]
    own = _Arguments(settings, local, secrets.randbits(_TURN_BITS), lacks)
    told = [
        _read(_Arguments, raw, rank)
        for rank, raw in zip(members, gather(group, members, asdict(own)), strict=True)
    ]
    describe = [f"rank {rank}" for rank in members].__getitem__
    require_equal_settings(
        [theirs.settings for theirs in told],
        describe,
        remedy="Bytes would land in the wrong place or be read as other numbers: give all ranks of both meshes the same",
        stage=_STAGE,
        rank=group.rank,
    )
    for rank, theirs in zip(members, told, strict=True):
        if theirs.lacks:
            raise TransportUnavailable(
                f"transport is m2n, and rank {rank} can't use it: {theirs.lacks}. Or give p2p; nothing was written",
                stage=_STAGE,
                rank=group.rank,
                blamed=rank,
            )
    by_rank = dict(zip(members, told, strict=True))
    end = source
    try:
        shape = request.shape
        if shape is None:
            shape = full_shape(request.source, _local_shapes(source, by_rank))
        for end in (source, destination):
            for rank, found in _local_shapes(end, by_rank).items():
                expected = local_shape(shape, end.side.mesh, end.side.placements, rank)
                if found != expected:
                    raise ValueError(_odd_shape(end.name, rank, found, expected, shape))
    except ValueError as error:
        raise RefitMismatch(
            f"{error}; nothing was written", stage=_STAGE, rank=group.rank, parameter=end.name
        ) from error
    complete = request.with_shape(shape)
    if not transfers.agreed(complete):
        plan = {"plan": transfers.compile(complete).digest}
        plans = [
            _read(dict[str, str], raw, rank)
            for rank, raw in zip(members, gather(group, members, plan), strict=True)
        ]
        require_equal_settings(
            plans, describe, remedy="Do all ranks run the same rlrefit?", stage=_STAGE, rank=group.rank
        )
        transfers.agree(complete, told[0].turn)
    return complete


def gather(group: Group, members: Sequence[int], own: Mapping[str, object]) -> list[bytes]:
    """Give every member what all members say, as zero-padded JSON, in the order of ``members``.

    The first member collects and passes on, so that members need no connections but to it.

    Raises:
        ValueError: longer than a record; a tensor of some hundred dimensions.
        PeerLost, RefitTimeout: a member did not take part.
    """
    raw = json.dumps(own, separators=(",", ":")).encode()
    if len(raw) > _RECORD_BYTES:
        raise ValueError(
            f"the tensors' shapes can't be told to the other ranks in {_RECORD_BYTES} bytes: {raw[:200]!r} …"
        )
    record = torch.frombuffer(bytearray(raw.ljust(_RECORD_BYTES, b"\0")), dtype=torch.uint8).to(group.device)
    everyone = torch.zeros(len(members), _RECORD_BYTES, dtype=torch.uint8, device=group.device)
    root = members[0]
    others = list(members[1:])
    group.connect(others if group.rank == root else [root])
    if group.rank == root:
        everyone[0] = record
        group.exchange([], [PeerBuffer(r, everyone[i]) for i, r in enumerate(others, 1)], _STAGE)
        flat = everyone.view(-1)
        group.exchange([PeerBuffer(r, flat) for r in others], [], _STAGE)
    else:
        group.exchange([PeerBuffer(root, record)], [], _STAGE)
        group.exchange([], [PeerBuffer(root, everyone.view(-1))], _STAGE)
    return [bytes(row.tolist()) for row in everyone.cpu()]


def _read[T](kind: type[T], raw: bytes, rank: int) -> T:
    """What ``rank`` said."""
    try:
        return decode(kind, json.loads(raw.rstrip(b"\0")))
    except ValueError as error:
        raise RefitMismatch(
            f"rank {rank} did not send its arguments but something else ({error}); nothing was written. All ranks of both "
            "meshes must call xferdtensor in the same order, with the same rlrefit",
            stage=_STAGE,
            rank=rank,
        ) from error


def _local_shapes(end: _End, told: Mapping[int, _Arguments]) -> dict[int, tuple[int, ...]]:
    """The shape of the local tensor of each rank of the end's mesh."""
    for rank in end.side.mesh.ranks:
        if end.name not in told[rank].shapes:
            raise ValueError(f"rank {rank} is in {end.name}_mesh but gave no tensor")
    return {rank: told[rank].shapes[end.name] for rank in end.side.mesh.ranks}


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _check_local_shapes(rank: int, shape: tuple[int, ...], source: _End, destination: _End) -> None:
    for end in (source, destination):
        if end.local is not None:
            expected = local_shape(shape, end.side.mesh, end.side.placements, rank)
            if tuple(end.local.shape) != expected:
                raise ValueError(_odd_shape(end.name, rank, tuple(end.local.shape), expected, shape))


def _odd_shape(
    end: str, rank: int, found: Sequence[int], expected: Sequence[int], shape: Sequence[int]
) -> str:
    return (
        f"{end} of rank {rank} has shape {tuple(found)}, but its placements give it {tuple(expected)} of a tensor of "
        f"shape {tuple(shape)} ({prod(shape)} elements); give the shape, mesh and placements that made it"
    )
