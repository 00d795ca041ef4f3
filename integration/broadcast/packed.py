"""The packed broadcast: full tensors in large messages from one trainer rank to every generation rank.

It carries the misc route of a shard-to-shard refit, and all weights where that is switched off (the
conventional path). Both sides lay the buckets out from the same ordered specs, so no metadata
travels during a refit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..comm.group import Group, members
from ..comm.opening import GroupChoice, open_group
from ..config import RefitConfig
from ..control.channel import Channel
from ..errors import RefitMismatch, VerificationError, end_all
from ..packing import Checksums, make_checksums
from ..plan import CHECKSUM_BYTES, aligned
from ..records.clock import StageClock
from ..weights.manifest import TensorSpec, dtype_name

# Bytes of a bucket on CPUs at most: larger ones go no faster over gloo, and the checksum of one would take long.
MOST_ON_CPU = 8 << 20
# Buffers whose prepared checksums are kept; an allocator that gives other addresses each time must not fill memory.
_MOST_PLACES = 256


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one message: ``(spec, byte offset)`` each, and the bytes before the checksum's slot."""

    slots: tuple[tuple[TensorSpec, int], ...]
    nbytes: int


def lay_out(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Pack ``specs`` in order into buckets; a tensor larger than ``bucket_bytes`` gets a bucket of its own."""
    buckets: list[Bucket] = []
    slots: list[tuple[TensorSpec, int]] = []
    cursor = 0
    for spec in specs:
        if slots and cursor + spec.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), cursor))
            slots, cursor = [], 0
        slots.append((spec, cursor))
        cursor = aligned(cursor + spec.nbytes)
    if slots:
        buckets.append(Bucket(tuple(slots), cursor))
    return buckets


class PackedBroadcast:
    """Sends or receives the same list of tensors every refit.

    Args:
        group: the sending trainer as group rank 0, and all generation ranks; None on the other trainer
            ranks, which only take part in the export.
        specs: what travels, in order; the order is part of the digest that both sides compare.
        bucket_bytes: size of a message.
        rank: refit-world rank, for errors.
        verify: ``off``, ``sampled`` (one bucket of a refit, another one each time) or ``full``: compare what
            arrived with what was sent, before the loader sees it.
        turn: at which bucket sampled checks begin; the same on all ranks.

    Attributes:
        nbytes: of the tensors together.
        staging_bytes: of the largest bucket.
        verified_bytes: that the last refit compared on this rank.
    """

    def __init__(
        self,
        group: Group | None,
        specs: Sequence[TensorSpec],
        bucket_bytes: int,
        rank: int,
        verify: str,
        turn: int,
    ):
        self._group = group
        self._rank = rank
        self._verify = verify
        self._turn = turn
        self._refits = 0
        self._checksums_at: dict[tuple[int, int], Checksums] = {}
        self.verified_bytes = 0
        self._buckets = lay_out(specs, bucket_bytes)
        self.nbytes = sum(spec.nbytes for spec in specs)
        self.staging_bytes = max((b.nbytes + CHECKSUM_BYTES for b in self._buckets), default=0)

    @staticmethod
    def open(
        channel: Channel,
        choice: GroupChoice,
        specs: Sequence[TensorSpec],
        config: RefitConfig,
        device: torch.device,
    ) -> PackedBroadcast:
        """The broadcast of ``specs`` from trainer rank 0, with a group of its own; all ranks of the epoch at the same time.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """
        world = channel.world
        place = members([0, *world.destinations], world.rank)
        bucket_bytes = config.bucket_bytes if device.type == "cuda" else min(config.bucket_bytes, MOST_ON_CPU)
        group = None
        if specs and place is not None:
            room = min(bucket_bytes, sum(spec.nbytes for spec in specs))
            group = open_group(channel, choice, "misc", place, device, 1, room)
            try:
                group.prepare_broadcast(0)
            except BaseException as error:
                end_all([partial(group.close, failed=True)], error)
                raise
        return PackedBroadcast(group, specs, bucket_bytes, world.rank, config.verify, channel.turn)

    @property
    def held_bytes(self) -> int:
        """Bytes of its group's own buckets, which are held between refits."""
        return self._group.staging_bytes if self._group is not None else 0

    def close(self, *, failed: bool = False) -> None:
        """Close the group; safe to call twice. ``failed``: peers may be gone."""
        group, self._group = self._group, None
        if group is not None:
            group.close(failed=failed)

    def send(self, weights: Iterator[tuple[str, torch.Tensor]], clock: StageClock) -> None:
        """Draw the tensors from a trainer's export and broadcast them; a drain on ranks without a group.

        Raises:
            RefitMismatch: the export yields another tensor than the specs say, or ends early, or goes on.
        """
        for index, bucket in enumerate(self._buckets):
            # One buffer at a time: the last one is given back before the next is taken.
            buffer = None
            if self._group is not None:
                buffer = self._buffer(bucket)
            with clock.stage("export"):
                for spec, offset in bucket.slots:
                    name, tensor = next(weights, ("", None))
                    self._check(spec, name, tensor)
                    if buffer is not None and tensor is not None:
                        _slot(buffer, spec, offset).copy_(tensor)
            if self._group is not None and buffer is not None:
                if self._checked(index):
                    with clock.stage("verify"):
                        self._checksum(buffer, buffer[-CHECKSUM_BYTES:].view(torch.int64))
                with clock.stage("misc"):
                    self._group.broadcast(buffer, 0, "misc")
        self._refits += 1
        with clock.stage("export"):
            extra = next(weights, None)
        if extra is not None:
            raise RefitMismatch(
                "the export yields this weight beyond those that both sides agreed on; the engine would not get it. "
                "Prepare the refit again after the model has changed.",
                stage="misc",
                rank=self._rank,
                parameter=extra[0],
            )

    def receive(self, clock: StageClock) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as they arrive. Each bucket is memory of its own: a loader may keep what it gets."""
        self.verified_bytes = 0
        for index, bucket in enumerate(self._buckets):
            buffer = self._buffer(bucket)
            assert self._group is not None, "only ranks with a group receive"
            with clock.stage("misc"):
                self._group.broadcast(buffer, 0, "misc")
            if self._checked(index):
                with clock.stage("verify"):
                    self._check_arrived(bucket, buffer)
            for spec, offset in bucket.slots:
                yield spec.name, _slot(buffer, spec, offset)
            del buffer  # unless the loader keeps a part of it
        self._refits += 1

    def load(self, loader: Callable[[Iterator[tuple[str, torch.Tensor]]], None], clock: StageClock) -> None:
        """Receive through an engine's loader.

        Raises:
            RefitMismatch: the loader did not take all weights; the engine would mix two versions.
        """
        weights = self.receive(clock)
        loader(weights)
        left = [name for name, _ in weights]
        if left:
            raise RefitMismatch(
                f"the engine's loader stopped with {len(left)} weights left; it would serve old values of them. "
                "A loader has to take all that it is given",
                stage="misc",
                rank=self._rank,
                parameter=left[0],
            )

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        assert self._group is not None, "only ranks with a group hold buffers"
        return torch.empty(bucket.nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=self._group.device)

    def _checked(self, index: int) -> bool:
        return self._verify == "full" or (
            self._verify == "sampled" and index == (self._turn + self._refits) % len(self._buckets)
        )

    def _checksum(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        place = buffer.data_ptr(), buffer.numel()
        checksums = self._checksums_at.get(place)
        if checksums is None:
            checksums = make_checksums([(buffer[:-CHECKSUM_BYTES], 0)], buffer.device)
            # On a GPU they know the buffer by its address, which the allocator gives again in the next refit.
            if buffer.device.type == "cuda" and len(self._checksums_at) < _MOST_PLACES:
                self._checksums_at[place] = checksums
        checksums.compute(out)

    def _check_arrived(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        found = torch.empty(2, dtype=torch.int64, device=buffer.device)
        self._checksum(buffer, found)
        names = [spec.name for spec, _ in bucket.slots]
        require_same_checksums(buffer[-CHECKSUM_BYTES:].view(torch.int64), found, names, self._rank)
        self.verified_bytes += sum(spec.nbytes for spec, _ in bucket.slots)

    def _check(self, spec: TensorSpec, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and (name, tuple(tensor.shape), tensor.dtype) == tuple(spec):
            return
        got = "nothing more" if tensor is None else f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        raise RefitMismatch(
            f"the export yields {got} where {dtype_name(spec.dtype)}{list(spec.shape)} was agreed on; bytes would be "
            "read as another weight. Prepare the refit again after the model has changed.",
            stage="misc",
            rank=self._rank,
            parameter=spec.name,
        )


def _slot(buffer: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    return buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


def require_same_checksums(
    sent: torch.Tensor, arrived: torch.Tensor, names: Sequence[str], rank: int
) -> None:
    """Compare a bucket's checksum with what was sent.

    Args:
        sent: int64 ``[2]``, as it travelled.
        arrived: int64 ``[2]``, of the bytes that arrived.
        names: of the weights in the bucket.
        rank: that reports.

    Raises:
        VerificationError: they differ; names the weights.
    """
    if not torch.equal(arrived, sent):
        raise VerificationError(
            f"a bucket of {len(names)} weights arrived with other bytes than were sent: {', '.join(names[:5])}"
            f"{' …' if len(names) > 5 else ''}. Nothing of it was given to the engine, which must not generate before the next "
            "refit. The network or a device's memory corrupts data: refit again, and replace the hardware if it comes back",
            stage="verify",
            rank=rank,
            parameter=names[0] if names else "",
        )
