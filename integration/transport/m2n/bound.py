"""A rank's part of what ``nccl.m2n`` carries, bound to its storage: all that a refit does, prepared batch by batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch

from ...comm.group import Group
from ...layout import Box, Fragment, local_slice
from ...packing import Copy, Strided, make_copy
from ...packing.host import copied_by_host
from ...plan import Segment, aligned
from ..checksums import Check, ChecksumRows
from ..messages import LocalMessage, LocalMessages
from ..storage import LiveViews, in_memory
from ..whole_tensors import RegionStorage, WholeTensor
from .meshes import MeshSide, MeshTransfer


@dataclass(frozen=True)
class BoundBatch:
    """What this rank does for one batch.

    Attributes:
        gathered: copies of live storage into the bucket, of what the library can't read where it lies.
        pairs: the library's descriptors of source and destination.
        scattered: copies out of the bucket, of what the library can't write where it lies.
        sent_checks: checksums of what is sent.
        landed_checks: checksums of what landed, read back from the parameters.
    """

    gathered: Copy
    pairs: list[tuple[Any, Any]]
    scattered: Copy
    sent_checks: list[Check]
    landed_checks: list[Check]


class BoundReshards:
    """A rank's batches bound to its storage.

    The library takes contiguous tensors in the GPU's memory. Anything else (experts in parameters of their own, a part of a fused
    parameter, what was offloaded to the host) goes through a bucket, one for each lane.

    Attributes:
        batches: in the order of all ranks.
        checksums: of the messages that ``p2p`` would have sent instead.
        buckets: uint8, of each lane.
    """

    def __init__(
        self,
        transfers: Sequence[Sequence[MeshTransfer]],
        messages: LocalMessages,
        fragments: Mapping[str, Sequence[Fragment]],
        group: Group,
        verify: str,
        describe: Describer,
        lanes: int,
    ):
        """
        Args:
            transfers: of each batch.
            messages: of this rank, with what the library carries alone.
            fragments: this rank's, by weight.
            group: of all ranks.
            verify: ``off``, ``sampled`` or ``full``.
            describe: makes the library's descriptors.
            lanes: batches take turns over so many.

        Raises:
            PlanError: a segment that this rank holds no fragment of.
        """
        self._device, self._rank = group.device, messages.rank
        self._views = LiveViews(list(chain(*fragments.values())), group.device)
        self._describe = describe
        self.checksums = ChecksumRows(messages, group, verify, all_apart=True)
        # Subclasses (vLLM's parameters) would run their own code for each question.
        with torch._C.DisableTorchFunctionSubclass():
            held = [[self._held(transfer, fragments) for transfer in batch] for batch in transfers]
        sizes = [sum(aligned(one.staged_bytes) for one in batch) for batch in held]
        self.buckets = [
            torch.zeros(max(sizes[lane::lanes], default=0), dtype=torch.uint8, device=self._device)
            for lane in range(lanes)
        ]
        of_batch = {
            name: number
            for number, batch in enumerate(transfers)
            for transfer in batch
            for name in transfer.tensor.names
        }
        sent = _by_batch(chain(*messages.sends), of_batch)
        landed = _by_batch(chain(*messages.receives), of_batch)
        with torch._C.DisableTorchFunctionSubclass():
            self.batches = [
                self._bind(batch, self.buckets[number % lanes], sent[number], landed[number])
                for number, batch in enumerate(held)
            ]
        # From here on plain addresses.
        self._views = LiveViews([])

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buckets."""
        return sum(bucket.numel() for bucket in self.buckets)

    @property
    def memory(self) -> list[object]:
        """All that a refit's kernels use, but for the exchange."""
        return [self.buckets, self.batches, self.checksums.memory]

    def _held(self, transfer: MeshTransfer, fragments: Mapping[str, Sequence[Fragment]]) -> _Held:
        tensor = transfer.tensor
        regions = tensor.sources.get(self._rank) or tensor.destinations.get(self._rank)
        if not regions:
            return _Held(transfer, None, 0)
        region = RegionStorage(tensor, regions[0], fragments)
        view = region.view
        in_place = view is not None and self._views.on_device(view) and Strided.of(view).contiguous
        return _Held(transfer, region, view.data_ptr() if in_place and view is not None else 0)

    def _bind(
        self,
        batch: Sequence[_Held],
        bucket: torch.Tensor,
        sent: Sequence[tuple[LocalMessage, Segment]],
        landed: Sequence[tuple[LocalMessage, Segment]],
    ) -> BoundBatch:
        pairs, gathered, scattered = [], [], []
        # What is staged, by weight: where the weight lies in the bucket, and its box there.
        staged: dict[str, tuple[torch.Tensor, Box]] = {}
        cursor = 0
        for transfer, region, address in batch:
            tensor = transfer.tensor
            is_source = self._rank in tensor.sources
            if region is not None and not address:
                nbytes = _nbytes(transfer, region)
                buffer = bucket[cursor : cursor + nbytes].view(tensor.dtype).view(region.shape)
                cursor += aligned(nbytes)
                address = buffer.data_ptr()
                parts = region.parts(buffer)
                if is_source:
                    gathered += parts
                    staged |= _weights_in(tensor, region.region, buffer)
                else:
                    scattered += [(raw, live) for live, raw in parts]
            held, wanted = (address, 0) if is_source else (0, address)
            pairs.append(self._describe.pair(transfer, held, wanted))

        def readable(_: LocalMessage, segment: Segment) -> torch.Tensor:
            live = in_memory(self._views.of(segment))
            if not copied_by_host(self._device, live):
                return live
            buffer, box = staged[segment.name]
            return buffer[local_slice(box, segment.box)]

        def landing(_: LocalMessage, segment: Segment) -> torch.Tensor:
            return in_memory(self._views.of(segment))

        rows = self.checksums
        return BoundBatch(
            make_copy(gathered, self._device),
            pairs,
            make_copy(scattered, self._device),
            rows.checks(sent, rows.sent_rows, readable),
            rows.checks(landed, rows.landed_rows, landing),
        )


class _Held(NamedTuple):
    """A transfer, this rank's region of it, and where the library can read or write that in place; 0 if it can't."""

    transfer: MeshTransfer
    region: RegionStorage | None
    address: int

    @property
    def staged_bytes(self) -> int:
        """Bytes that go through a bucket."""
        return 0 if self.region is None or self.address else _nbytes(self.transfer, self.region)


class Describer:
    """Makes the library's descriptors.

    Args:
        m2n: the module ``nccl.m2n``.
    """

    def __init__(self, m2n: Any):
        self._m2n = m2n

    def pair(
        self,
        transfer: MeshTransfer,
        source: int,
        destination: int,
        shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> tuple[Any, Any]:
        """Descriptors of both sides.

        Args:
            transfer: what moves.
            source: address of this rank's part on the source's side; 0 if it has none.
            destination: of its part on the destination's side.
            shapes: local shapes on both sides, of another tensor with the transfer's meshes.
        """
        ours, theirs = shapes or (transfer.source.local_shape, transfer.destination.local_shape)
        return self._side(transfer, transfer.source, ours, source), self._side(
            transfer, transfer.destination, theirs, destination
        )

    def _side(self, transfer: MeshTransfer, side: MeshSide, shape: tuple[int, ...], address: int) -> Any:
        m2n = self._m2n
        placements: list[Any] = [m2n.Replicate(), m2n.Replicate()]
        placements[side.shard_axis] = m2n.Shard(side.shard_dim)
        return m2n.DistTensor(
            address or None,
            local_shape=shape,
            dtype=transfer.tensor.dtype,
            mesh=m2n.Mesh(side.dims, start_rank=side.start),
            placements=placements,
        )


def _nbytes(transfer: MeshTransfer, region: RegionStorage) -> int:
    return prod(region.shape) * transfer.tensor.dtype.itemsize


def _weights_in(
    tensor: WholeTensor, region: Box, buffer: torch.Tensor
) -> dict[str, tuple[torch.Tensor, Box]]:
    """Each weight's part of a region, and the weight's box that it holds."""
    if not tensor.stacked:
        return {tensor.names[0]: (buffer, region)}
    first, last = region[0]
    return {tensor.names[i]: (buffer[i - first], region[1:]) for i in range(first, last)}


def _by_batch(
    messages: Iterable[LocalMessage], of_batch: Mapping[str, int]
) -> Mapping[int, list[tuple[LocalMessage, Segment]]]:
    found: dict[int, list[tuple[LocalMessage, Segment]]] = defaultdict(list)
    for one in messages:
        for segment in one.message.segments:
            found[of_batch[segment.name]].append((one, segment))
    return found
