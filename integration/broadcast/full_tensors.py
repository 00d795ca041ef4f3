"""Full tensors of any names, shapes and dtypes between ranks that have agreed on nothing but the size of a bucket.

For trainers that export full tensors and nothing else. The sender packs a bucket while it sends the one before, and the
receiver hands out the tensors of a bucket while the next one arrives; each holds two. A tensor larger than a bucket travels in
parts and is put together on arrival.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..comm.group import members
from ..comm.torch_group import TorchGroup
from ..config import require_equal_settings
from ..control import Rendezvous, RendezvousServer
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..errors import PeerLost, RefitError, RefitMismatch, end_all
from ..gpu_memory.availability import nccl_release
from ..layout import flat_bytes
from ..plan import aligned
from ..records.clock import StageClock
from ..records.record import RefitRecord
from ..weights.endpoints import rank_device
from ..weights.manifest import dtype_name, dtype_of
from .buckets import AT_ONCE
from .messages import Arrived, Messages, TensorPart

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class FullTensorSettings:
    """What all ranks of an epoch have to be given alike, but for ``timeout_s``."""

    bucket_bytes: int
    verify: str
    timeout_s: float


class FullTensorEpoch:
    """Channel, group and thread of one membership; made on all its ranks at the same time.

    All that can wait for another rank happens in one thread of the epoch, so that the caller's event loop goes on.

    Args:
        rendezvous: where the ranks meet.
        rank: in the refit world, trainers first.
        settings: of the messages.
        server: of the rendezvous, on trainer rank 0; closed with the epoch.
        version: that this rank holds, where versions are counted and not given.

    Attributes:
        version: the largest that any rank holds. They may differ: one may have failed after all had got the last version.

    Raises:
        RefitMismatch: the ranks were set up with different values.
        RefitTimeout, PeerLost: not all ranks came.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        settings: FullTensorSettings,
        server: RendezvousServer | None = None,
        version: int = -1,
    ):
        self.version = version
        self.world = RefitWorld(rank, rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
        self.failed = ""
        self.device = rank_device()
        self._server = server
        self._settings = settings
        self._clock = StageClock(self.device)
        self._refits = 0
        self._channel: Channel | None = None
        self._messages: Messages | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlrefit-messages")
        self._last: Future[object] | None = None
        try:
            self.submit(self._connect, rendezvous).result()
        except BaseException as error:
            self.fail(error)
            raise

    def submit[**P, T](self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in the epoch's thread."""
        future = self._thread.submit(self._run, call, *args, **kwargs)
        self._last = future  # type: ignore[assignment]
        return future

    def _run[**P, T](self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except RefitError as error:
            if self._channel is None:
                raise
            self._channel.give_up(error)
            if self._messages is not None:
                self._messages.close(failed=True)
            cause = self._channel.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def healthy(self) -> bool:
        """Whether another refit can run: nothing has failed here, and no other rank has gone or given up."""
        if self.failed:
            return False
        if self._last is not None and not self._last.done():
            self.fail(RefitError("another update began before this one had ended here", rank=self.world.rank))
            return False
        try:
            self.submit(self._open_channel.check_abort, "handshake").result()
        except RefitError as error:
            logger.warning("the group of %d ranks is made anew: %s", self.world.size, error)
            self.fail(error)
            return False
        return True

    async def send(self, weights: Weights, version: int | None) -> RefitRecord:
        """Trainer ranks: draw all weights, on rank 0 send them, and return once all ranks have got them.

        Drawing is a collective of the trainer's ranks, so it goes on to its end if sending fails: no other trainer
        rank is left waiting in it, and the trainer can go on without the engines.

        Raises:
            RefitError: and its kinds; the epoch is over then.
        """
        clock, failure = self._clock, None
        clock.restart()
        try:
            try:
                await self._begin(version)
            except RefitError as error:
                failure = error
                self.fail(error)
            sender = BucketSender(self._messages, self.submit, clock) if self._messages is not None else None
            drawn = _drawn(weights)
            while True:
                with clock.stage("export"):
                    weight = await anext(drawn, None)
                if weight is None:
                    break
                if sender is not None and failure is None:
                    try:
                        await sender.put(*weight)
                    except Exception as error:
                        # Told at once: the drawing can take as long as a refit.
                        failure = await self._failed_for(self._named(error))
            if failure is not None:
                raise failure
            if sender is not None:
                await sender.end()
            await self._commit()
        except BaseException as error:
            cause = await self._failed_for(error)
            if cause is not error:
                raise cause from error
            raise
        moved, staging = (sender.nbytes, sender.staging_bytes) if sender is not None else (0, 0)
        return self._record(version, moved, 0, staging)

    async def receive(
        self, version: int | None, done: Callable[[RefitRecord], None]
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Generation ranks: all weights as they arrive; ``done`` gets the record when all ranks have got them.

        Raises:
            RefitError: and its kinds; the epoch is over then, and what was loaded is no version at all.
        """
        clock = self._clock
        clock.restart()
        try:
            await self._begin(version)
            assert self._messages is not None, "generation ranks are in the group"
            receiver = _BucketReceiver(self._messages, self.submit, clock)
            async for weight in receiver.tensors():
                yield weight
            await self._commit()
        except BaseException as error:  # the loader's own end, too: the others would wait for this rank
            cause = await self._failed_for(error)
            if cause is not error:
                raise cause from error
            raise
        done(self._record(version, receiver.nbytes, receiver.verified, receiver.staging_bytes))

    def fail(self, error: BaseException) -> None:
        """End the epoch on all ranks; safe to call twice. Does not wait."""
        if self.failed:
            return
        self.failed = f"{type(error).__name__}: {error}"
        self._end(self.failed)

    def close(self) -> None:
        """End the epoch on this rank; the others do the same. Does not wait."""
        if not self.failed:
            self.failed = "closed"
            self._end("")

    def _end(self, reason: str) -> None:
        # In its thread, after what is under way there: that ends by itself, at the latest with its timeout.
        self._thread.submit(self._disconnect, reason)
        self._thread.shutdown(wait=False)

    def _connect(self, rendezvous: Rendezvous) -> None:
        settings, world = self._settings, self.world
        start = time.monotonic()
        self._channel = channel = Channel(rendezvous, world, settings.timeout_s)
        with channel.within(start):
            self._agree_and_open(channel)

    def _agree_and_open(self, channel: Channel) -> None:
        settings, world = self._settings, self.world
        ours = {
            "bucket bytes": settings.bucket_bytes,
            "verify": settings.verify,
            "kind of device": self.device.type,
            "release of NCCL": nccl_release(self.device),
        }
        told = channel.vote("settings", [ours, self.version])
        self.version = max(version for _, version in told)
        require_equal_settings(
            [theirs for theirs, _ in told],
            world.describe,
            remedy="Give all workers the same checkpoint_engine section and the same nvidia-nccl, and run them on devices of one kind",
            stage="settings",
            rank=world.rank,
        )
        place = members([0, *world.destinations], world.rank)
        if place is not None:
            group = TorchGroup.open(
                channel.store,
                "full",
                *place,
                device=self.device,
                timeout_s=settings.timeout_s,
                watch=channel.check_abort,
                address=channel.address,
            )
            self._messages = Messages(group, world.rank, settings.bucket_bytes, settings.verify, channel.turn)
        channel.barrier("ready")

    def _disconnect(self, reason: str) -> None:
        steps: list[Callable[[], object]] = []
        if self._channel is not None and reason:
            steps.append(partial(self._channel.abort, reason))
        steps += [partial(self._messages.close, failed=bool(reason))] if self._messages is not None else []
        steps += [one.close for one in (self._channel, self._server) if one is not None]
        try:
            end_all(steps)
        except Exception:  # nobody waits for this
            logger.exception("the group of %d ranks did not end as it should", self.world.size)

    @property
    def _open_channel(self) -> Channel:
        assert self._channel is not None, "set before the constructor returns"
        return self._channel

    async def _begin(self, version: int | None) -> None:
        if self.failed:
            raise RefitError(
                f"the group of this update has ended ({self.failed}); the next update makes a new one",
                stage="handshake",
                rank=self.world.rank,
            )
        with self._clock.stage("handshake"), self._clock.waiting():
            await self._barrier("begin", version)

    async def _commit(self) -> None:
        with self._clock.stage("commit"), self._clock.waiting():
            await self._barrier("commit", None)
        self._refits += 1

    async def _barrier(self, name: str, version: int | None) -> None:
        topic = f"{name}/{self._refits}"
        await asyncio.wrap_future(self.submit(self._open_channel.barrier, topic, version=version))

    async def _failed_for[E: BaseException](self, error: E) -> E | RefitError:
        """As :meth:`fail`; returns what to raise: where the connection broke, the reason that another rank gave before it hung up."""
        cause: E | RefitError = error
        if isinstance(error, PeerLost) and not self.failed:
            try:
                await asyncio.wrap_future(self.submit(self._open_channel.check_abort, error.stage))
            except RefitError as told:
                cause = told
        self.fail(cause)
        return cause

    def _named(self, error: Exception) -> RefitError:
        if isinstance(error, RefitError):
            return error
        named = PeerLost(f"sending failed: {error}", stage="misc", rank=self.world.rank)
        named.__cause__ = error
        return named

    def _record(self, version: int | None, moved: int, verified: int, staging: int) -> RefitRecord:
        clock, world = self._clock, self.world
        return RefitRecord(
            version=-1 if version is None else version,
            epoch=world.epoch,
            rank=world.rank,
            role="trainer" if world.is_source else "generation",
            engine="full_tensors",
            transport="broadcast",
            bytes_bulk=0,
            bytes_misc=moved,
            bytes_kept=0,
            bytes_verified=verified,
            seconds_total=clock.wall_seconds,
            seconds=clock.seconds,
            host_seconds=clock.host_seconds,
            peak_extra_bytes=staging,
        )


async def _drawn(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for weight in weights:
            yield weight
    else:
        for weight in weights:
            yield weight


class Submit(Protocol):
    """Runs calls in the one thread that sends and receives."""

    def __call__[**P, T](self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The call's future."""


class BucketSender:
    """Packs the tensors of one refit, and sends each full bucket.

    Args:
        messages: of the epoch.
        submit: runs a call in the epoch's thread.
        clock: of the refit; waits for messages are its stage ``misc``.

    Attributes:
        nbytes: of the tensors so far.
    """

    def __init__(self, messages: Messages, submit: Submit, clock: StageClock):
        self._messages, self._submit, self._clock = messages, submit, clock
        self._sending: Future[None] | None = None
        self._bucket: torch.Tensor | None = None
        self._parts: list[TensorPart] = []
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
        if self._parts and self._cursor + raw.numel() > self._messages.bucket_bytes:
            await self._flush(last=False)
        start = 0
        while True:
            chunk = raw[start : start + self._messages.bucket_bytes]
            with self._clock.stage("pack"):
                self._buffer()[self._cursor : self._cursor + chunk.numel()].copy_(chunk)
            whole = dtype_name(tensor.dtype), list(tensor.shape)
            self._parts.append(TensorPart(name, *whole, start, chunk.numel(), self._cursor))
            self._cursor = aligned(self._cursor + chunk.numel())
            start += chunk.numel()
            if start >= raw.numel():
                return
            await self._flush(last=False)

    async def end(self) -> None:
        """Send what is left, and wait until all has left.

        Raises:
            RefitMismatch: nothing came, and the engines would keep what they have as a new version.
        """
        if not self._names:
            raise RefitMismatch(
                "the trainer's export yields no weight: it was drawn before, perhaps. Nothing was sent, and the engines hold what they "
                "held",
                stage="export",
                rank=self._messages.rank,
            )
        await self._flush(last=True)
        await self._drain()

    @property
    def staging_bytes(self) -> int:
        """Of the buckets at their most."""
        return min(AT_ONCE, self._buckets) * self._messages.bucket_bytes

    def _bytes_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise self._wrong(
                name,
                f"as a {type(tensor).__name__} of layout {tensor.layout}, whose bytes are not those of the whole weight; "
                "gather it (DTensor.full_tensor(), say) before it is sent",
            )
        return flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())

    def _wrong(self, name: str, what: str) -> RefitMismatch:
        return RefitMismatch(
            f"the trainer's export yields this weight {what}. The engines hold a part of this update and must not "
            "generate before the next",
            stage="export",
            rank=self._messages.rank,
            parameter=name,
        )

    def _buffer(self) -> torch.Tensor:
        if self._bucket is None:
            self._bucket = self._messages.to_pack()
        return self._bucket

    async def _flush(self, *, last: bool) -> None:
        bucket, packed = self._buffer()[: self._cursor], self._messages.packed()
        await self._drain()
        self._sending = self._submit(self._messages.send, bucket, self._parts, self._buckets, last, packed)
        self._buckets += 1
        self._bucket, self._parts, self._cursor = None, [], 0

    async def _drain(self) -> None:
        if self._sending is not None:
            with self._clock.stage("misc"), self._clock.waiting():
                await asyncio.wrap_future(self._sending)
        self._sending = None


class _BucketReceiver:
    """Hands out the tensors of one refit as they arrive.

    Args:
        messages: of the epoch.
        submit: runs a call in the epoch's thread.
        clock: of the refit; waits for messages are its stage ``misc``.

    Attributes:
        nbytes: of the tensors so far.
        verified: those whose checksums were compared.
        staging_bytes: of the two largest buckets in a row.
    """

    def __init__(self, messages: Messages, submit: Submit, clock: StageClock):
        self._messages, self._submit, self._clock = messages, submit, clock
        self._whole: torch.Tensor | None = None
        self.nbytes = self.verified = self.staging_bytes = 0

    async def tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """All tensors, in the order in which they were sent.

        Each bucket is memory of its own: a loader may keep what it gets, and one that uses it on another stream than
        the current one has to record that, as ever.
        """
        index = before = 0
        coming: Future[Arrived] | None = self._submit(self._messages.receive, 0)
        while coming is not None:
            with self._clock.stage("misc"), self._clock.waiting():
                arrived = await asyncio.wrap_future(coming)
            index, coming = index + 1, None
            # The engine's own variable still holds the last tensor of the bucket before, until it has the first one of this.
            ahead = self._messages.free()
            self.staging_bytes = max(self.staging_bytes, before + arrived.bucket.numel())
            before = arrived.bucket.numel()
            if arrived.bucket.is_cuda:  # taken on the messages' stream, used on this one
                arrived.bucket.record_stream(torch.cuda.current_stream(self._messages.device))
            for part in arrived.parts:
                if ahead and coming is None and not arrived.last:
                    coming = self._submit(self._messages.receive, index)
                self.nbytes += part.nbytes
                self.verified += part.nbytes if arrived.checked else 0
                tensor = self._put_together(part, arrived.bucket)
                if tensor is not None:
                    yield part.name, tensor
                    ahead = True
                del tensor
            if coming is None and not arrived.last:
                coming = self._submit(self._messages.receive, index)
            del arrived  # unless the loader keeps a part of it

    def _put_together(self, part: TensorPart, bucket: torch.Tensor) -> torch.Tensor | None:
        """The tensor that ``part`` completes, if it does."""
        dtype = dtype_of(part.dtype)
        chunk = bucket[part.offset : part.offset + part.nbytes]
        nbytes = dtype.itemsize * torch.Size(part.shape).numel()
        if part.nbytes == nbytes:
            return chunk.view(dtype).view(part.shape)
        if part.start == 0:
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=bucket.device)
        assert self._whole is not None, "messages bring parts through in their order alone"
        self._whole[part.start : part.start + part.nbytes].copy_(chunk)
        if part.start + part.nbytes < nbytes:
            return None
        whole, self._whole = self._whole, None
        return whole.view(dtype).view(part.shape)
