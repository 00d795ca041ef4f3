"""Full tensors of any names, shapes and dtypes into buckets, and out of them.

The sender packs a bucket while the one before is on the wire, and the receiver hands out the tensors of a bucket while
the next one arrives; each holds two. A tensor larger than a bucket travels in pieces and is put together on arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from ..errors import RefitMismatch
from ..plan import aligned
from ..records.clock import StageClock
from ..weights.manifest import dtype_name, dtype_of
from .pieces import Piece
from .wire import Arrived, Wire


class Submit(Protocol):
    """Runs calls in the one thread that owns the wire."""

    def __call__[**P, T](self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The call's future."""


class BucketSender:
    """Packs the tensors of one refit, and gives full buckets to the wire.

    Args:
        wire: of the epoch.
        submit: runs a call in the wire's thread.
        clock: of the refit; waits for the wire are its stage ``misc``.

    Attributes:
        nbytes: of the tensors so far.
    """

    def __init__(self, wire: Wire, submit: Submit, clock: StageClock):
        self._wire, self._submit, self._clock = wire, submit, clock
        self._under_way: Future[None] | None = None
        self._buffers: list[torch.Tensor] = []
        self._pieces: list[Piece] = []
        self._names: set[str] = set()
        self._cursor = self._buckets = 0
        self.nbytes = 0

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        """Pack a tensor; its memory may be written again when this returns.

        Raises:
            RefitMismatch: the name came before, or the tensor is no whole, dense one.
        """
        if name in self._names:
            raise self._wrong(
                name, "twice, and the engine would keep either of them; export each weight once"
            )
        self._names.add(name)
        raw = self._bytes_of(name, tensor)
        self.nbytes += raw.numel()
        if self._pieces and self._cursor + raw.numel() > self._wire.bucket_bytes:
            await self._flush(last=False)
        start = 0
        while True:
            part = raw[start : start + self._wire.bucket_bytes]
            with self._clock.stage("pack"):
                self._buffer()[self._cursor : self._cursor + part.numel()].copy_(part)
            whole = dtype_name(tensor.dtype), list(tensor.shape)
            self._pieces.append(Piece(name, *whole, start, part.numel(), self._cursor))
            self._cursor = aligned(self._cursor + part.numel())
            start += part.numel()
            if start >= raw.numel():
                return
            await self._flush(last=False)

    async def end(self) -> None:
        """Send what is left, and wait until all has left."""
        await self._flush(last=True)
        await self._drain()

    @property
    def staging_bytes(self) -> int:
        """Of the buckets that were taken."""
        return sum(buffer.numel() for buffer in self._buffers)

    def _bytes_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise self._wrong(
                name,
                f"as a {type(tensor).__name__} of layout {tensor.layout}, whose bytes are not those of the whole weight; "
                "gather it (DTensor.full_tensor(), say) before it is sent",
            )
        return tensor.detach().contiguous().view(-1).view(torch.uint8)

    def _wrong(self, name: str, what: str) -> RefitMismatch:
        return RefitMismatch(
            f"the trainer's export yields this weight {what}. The engines hold a part of this update and must not "
            "generate before the next",
            stage="export",
            rank=self._wire.rank,
            parameter=name,
        )

    def _buffer(self) -> torch.Tensor:
        # They take turns: the bucket before the last has left the device.
        place = self._buckets % 2
        if place == len(self._buffers):
            size, device = self._wire.bucket_bytes, self._wire.device
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=device))
        return self._buffers[place]

    async def _flush(self, *, last: bool) -> None:
        bucket, packed = self._buffer()[: self._cursor], self._wire.packed()
        await self._drain()
        self._under_way = self._submit(self._wire.send, bucket, self._pieces, self._buckets, last, packed)
        self._buckets += 1
        self._pieces, self._cursor = [], 0

    async def _drain(self) -> None:
        if self._under_way is not None:
            with self._clock.stage("misc"), self._clock.waiting():
                await asyncio.wrap_future(self._under_way)
        self._under_way = None


class BucketReceiver:
    """Hands out the tensors of one refit as they arrive.

    Args:
        wire: of the epoch.
        submit: runs a call in the wire's thread.
        clock: of the refit; waits for the wire are its stage ``misc``.

    Attributes:
        nbytes: of the tensors so far.
        verified: those whose checksums were compared.
        staging_bytes: of the two largest buckets in a row.
    """

    def __init__(self, wire: Wire, submit: Submit, clock: StageClock):
        self._wire, self._submit, self._clock = wire, submit, clock
        self._whole: torch.Tensor | None = None
        self.nbytes = self.verified = self.staging_bytes = 0

    async def tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """All tensors, in the order in which they were sent.

        Each bucket is memory of its own: a loader may keep what it gets, and one that uses it on another stream than
        the current one has to record that, as ever.
        """
        index = before = 0
        coming: Future[Arrived] | None = self._submit(self._wire.receive, 0)
        while coming is not None:
            with self._clock.stage("misc"), self._clock.waiting():
                arrived = await asyncio.wrap_future(coming)
            index += 1
            coming = None if arrived.last else self._submit(self._wire.receive, index)
            self.staging_bytes = max(self.staging_bytes, before + arrived.bucket.numel())
            before = arrived.bucket.numel()
            if arrived.bucket.is_cuda:  # taken on the wire's stream, used on this one
                arrived.bucket.record_stream(torch.cuda.current_stream(self._wire.device))
            for piece in arrived.pieces:
                self.nbytes += piece.nbytes
                self.verified += piece.nbytes if arrived.checked else 0
                tensor = self._put_together(piece, arrived.bucket)
                if tensor is not None:
                    yield piece.name, tensor
            del arrived  # unless the loader keeps a part of it

    def _put_together(self, piece: Piece, bucket: torch.Tensor) -> torch.Tensor | None:
        """The tensor that ``piece`` completes, if it does."""
        dtype = dtype_of(piece.dtype)
        part = bucket[piece.offset : piece.offset + piece.nbytes]
        nbytes = dtype.itemsize * torch.Size(piece.shape).numel()
        if piece.nbytes == nbytes:
            return part.view(dtype).view(piece.shape)
        if piece.start == 0:
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=bucket.device)
        assert self._whole is not None, "the wire lets pieces through in their order alone"
        self._whole[piece.start : piece.start + piece.nbytes].copy_(part)
        if piece.start + piece.nbytes < nbytes:
            return None
        whole, self._whole = self._whole, None
        return whole.view(dtype).view(piece.shape)
