"""NVIDIA's ``nccl.m2n`` (package ``nccl-extensions``): one tensor at a time between two meshes of ranks.

It takes meshes of at most two dimensions with one sharded axis on each side, even shards, consecutive ranks, and tensors of
one to three dimensions. :func:`mesh_transfer` says for each tensor whether it fits, or why not. :func:`unavailable` says why
the library can't be used in this process.

``rlrefit bench`` times it beside refits. It is not a transport of refits yet: ``policy.refit.transport: m2n`` is refused, with
the reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RefitError
from ..layout import Box, Fragment, box_of
from .whole_tensors import RegionStorage, WholeTensor

# Oldest NCCL that nccl.m2n 0.1.0 runs on (NCCL_M2N_MIN_NCCL_VERSION_CODE in its nccl_m2n.h).
_OLDEST_NCCL = (2, 30, 5)
_MAX_TENSOR_DIMS = 3


@dataclass(frozen=True)
class MeshSide:
    """One side's mesh and placement.

    Attributes:
        start: first rank; the mesh owns the ``dims[0] * dims[1]`` ranks from there, row by row.
        dims: mesh dimensions.
        shard_axis: which of the two mesh dimensions shards; the other replicates.
        shard_dim: the tensor dimension that it cuts into even parts.
        local_shape: shape on each rank.
    """

    start: int
    dims: tuple[int, int]
    shard_axis: int
    shard_dim: int
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class MeshTransfer:
    """A tensor that ``nccl.m2n`` can move, with both sides' meshes."""

    tensor: WholeTensor
    source: MeshSide
    destination: MeshSide


def unavailable(device: torch.device) -> str:
    """Why ``nccl.m2n`` can't run in this process; empty if it can."""
    if device.type != "cuda":
        return "nccl.m2n needs GPUs"
    try:
        importlib.import_module("nccl.m2n")
        core = importlib.import_module("nccl.core")
    except (ImportError, RuntimeError, OSError) as error:
        return f"nccl.m2n can't be imported ({error}); pip install 'nccl-extensions[cu13]'"
    loaded = core.get_version().libnccl
    if loaded is None:
        return "nccl.m2n found no libnccl"
    if tuple(loaded.version.release) < _OLDEST_NCCL:
        return (
            f"nccl.m2n needs NCCL {'.'.join(map(str, _OLDEST_NCCL))} or newer, and {loaded.version} is loaded; "
            "preload a newer libnccl.so.2 with LD_PRELOAD"
        )
    if os.environ.get("NCCL_CUMEM_ENABLE") != "1":
        return "nccl.m2n needs NCCL's cuMem allocator; start all ranks with NCCL_CUMEM_ENABLE=1"
    return ""


def mesh_transfer(tensor: WholeTensor) -> MeshTransfer | str:
    """How ``nccl.m2n`` moves ``tensor``, or the reason why it can't."""
    if not 1 <= len(tensor.shape) <= _MAX_TENSOR_DIMS:
        return f"it has {len(tensor.shape)} dimensions, nccl.m2n takes 1 to {_MAX_TENSOR_DIMS}"
    if set(tensor.sources) & set(tensor.destinations):
        return "a rank is on both sides"
    sides = []
    for who, regions in (("trainer", tensor.sources), ("engine", tensor.destinations)):
        side = _side(tensor.shape, regions)
        if isinstance(side, str):
            return f"{who}: {side}"
        sides.append(side)
    return MeshTransfer(tensor, *sides)


def _side(shape: tuple[int, ...], regions: Mapping[int, tuple[Box, ...]]) -> MeshSide | str:
    ranks = sorted(regions)
    count = len(ranks)
    if not ranks:
        return "no rank holds it"
    if ranks != list(range(ranks[0], ranks[0] + count)):
        return f"its ranks {ranks} do not follow each other"
    if any(len(held) != 1 for held in regions.values()):
        return "a rank holds several regions of it"
    boxes = [regions[rank][0] for rank in ranks]
    if all(box == box_of(shape) for box in boxes):
        # All replicate: put as a sharding axis of size 1.
        return MeshSide(ranks[0], (count, 1), 1, 0, shape)
    for dim, size in enumerate(shape):
        for shards in range(2, count + 1):
            if count % shards or size % shards:
                continue
            replicas = count // shards
            if boxes == [_shard(shape, dim, shards, i % shards) for i in range(count)]:
                return MeshSide(ranks[0], (replicas, shards), 1, dim, _local(shape, dim, shards))
            if boxes == [_shard(shape, dim, shards, i // replicas) for i in range(count)]:
                return MeshSide(ranks[0], (shards, replicas), 0, dim, _local(shape, dim, shards))
    return "no mesh of two dimensions with one even sharded axis describes it"


def _local(shape: tuple[int, ...], dim: int, shards: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // shards, *shape[dim + 1 :])


def _shard(shape: tuple[int, ...], dim: int, shards: int, index: int) -> Box:
    step = shape[dim] // shards
    full = box_of(shape)
    return (*full[:dim], (index * step, (index + 1) * step), *full[dim + 1 :])


class M2nReshard:
    """Moves tensors one after another through ``nccl.m2n`` on the current stream.

    The library takes contiguous tensors only. Sources that are not (stacked experts) are copied before each call, and
    destinations that are not are received into a buffer and copied from it.
    """

    def __init__(
        self,
        transfers: Sequence[MeshTransfer],
        fragments: Mapping[str, Sequence[Fragment]],
        rank: int,
        size: int,
        share: Callable[[bytes | None], bytes],
    ):
        """Connect; all ranks do so at the same time.

        Args:
            transfers: what moves, the same list on all ranks.
            fragments: this rank's fragments by weight.
            rank: this rank in the refit world.
            size: ranks of the refit world.
            share: gives all ranks the bytes that rank 0 passes (the communicator's id); others pass None.

        Raises:
            RefitError: the communicator can't be made.
        """
        self._m2n: Any = importlib.import_module("nccl.m2n")
        core: Any = importlib.import_module("nccl.core")
        unique = share(bytes(core.get_unique_id()) if rank == 0 else None)
        try:
            self._comm = core.Communicator.init(size, rank, core.UniqueId.from_bytes(unique))
            self._handle = self._m2n.Handle.create()
        except Exception as error:
            raise RefitError(
                f"nccl.m2n's communicator of {size} ranks could not be made: {error}. Use transport p2p, or run with "
                "NCCL_DEBUG=WARN to see NCCL's reason.",
                stage="process group",
                rank=rank,
            ) from error
        self._calls = [self._bound(transfer, fragments, rank) for transfer in transfers]

    def run(self) -> None:
        """Enqueue all transfers on the current stream; the weights may be used after it is synchronized."""
        stream = torch.cuda.current_stream()
        for source, destination, describe_source, describe_destination in self._calls:
            sent = source.gather().contiguous() if source is not None else None
            received = destination.receiving() if destination is not None else None
            self._handle.reshard(
                self._comm, describe_source(sent), describe_destination(received), stream=stream.cuda_stream
            )
            if destination is not None and received is not None:
                destination.scatter(received)

    def close(self) -> None:
        """Free the library's handle and communicator; the device must be idle."""
        torch.cuda.synchronize()
        self._handle.destroy()
        self._comm.destroy()

    def _bound(
        self, transfer: MeshTransfer, fragments: Mapping[str, Sequence[Fragment]], rank: int
    ) -> tuple[RegionStorage | None, RegionStorage | None, Callable[[Any], Any], Callable[[Any], Any]]:
        tensor = transfer.tensor
        held, wanted = tensor.sources.get(rank), tensor.destinations.get(rank)
        return (
            RegionStorage(tensor, held[0], fragments) if held else None,
            RegionStorage(tensor, wanted[0], fragments) if wanted else None,
            self._describer(transfer.source, tensor.dtype),
            self._describer(transfer.destination, tensor.dtype),
        )

    def _describer(self, side: MeshSide, dtype: torch.dtype) -> Callable[[Any], Any]:
        m2n = self._m2n
        mesh = m2n.Mesh(side.dims, start_rank=side.start)
        placements: list[Any] = [m2n.Replicate(), m2n.Replicate()]
        placements[side.shard_axis] = m2n.Shard(side.shard_dim)

        def describe(buffer: torch.Tensor | None) -> Any:
            return m2n.DistTensor(
                buffer, local_shape=side.local_shape, dtype=dtype, mesh=mesh, placements=placements
            )

        return describe
