"""The packed broadcast: full tensors in large messages from one trainer rank to every generation rank.

It carries the misc route of a shard-to-shard refit, and all weights where that is switched off (the
conventional path). Both sides lay the buckets out from the same ordered specs, so no metadata
travels during a refit. :mod:`.messages` is for trainers and engines that have agreed on no specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..comm.group import members
from ..comm.opening import GroupChoice, open_group
from ..config import RefitConfig
from ..control.channel import Channel
from ..errors import RefitMismatch, closed_on_error
from ..plan import CHECKSUM_BYTES, aligned
from ..records.clock import StageClock
from ..weights.manifest import TensorSpec, dtype_name
from .buckets import AT_ONCE, Buckets

# Bytes of a bucket on CPUs at most: larger ones go no faster over gloo, and the checksum of one would take long.
_MOST_ON_CPU = 8 << 20


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
        specs: what travels, in order; the order is part of the digest that both sides compare.
        bucket_bytes: size of a bucket.
        rank: refit-world rank, for errors.

    Attributes:
        nbytes: of the tensors together.
        verified_bytes: that the last refit compared on this rank.
    """

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int, rank: int):
        self._rank = rank
        # None on the other trainer ranks, which only take part in the export.
        self._buckets: Buckets | None = None
        self._layout = lay_out(specs, bucket_bytes)
        # Of each bucket, its checksum among them.
        self._sizes = [bucket.nbytes + CHECKSUM_BYTES for bucket in self._layout]
        self.verified_bytes = 0
        self.nbytes = sum(spec.nbytes for spec in specs)

    @staticmethod
    def open(
        channel: Channel,
        choice: GroupChoice,
        specs: Sequence[TensorSpec],
        config: RefitConfig,
        device: torch.device,
        *,
        sleeps: bool = False,
    ) -> PackedBroadcast:
        """The broadcast of ``specs`` from trainer rank 0, with a group of its own; all ranks of the epoch at the same time.

        Args:
            channel: of the epoch.
            choice: of the group. Buckets are held between refits where no two ranks share a GPU.
            specs: what travels, in order.
            config: the same on all ranks.
            device: of the parameters.
            sleeps: whether this rank gives memory back between refits, so that no bucket is held.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """
        world = channel.world
        place = members([0, *world.destinations], world.rank)
        bucket_bytes = (
            config.bucket_bytes if device.type == "cuda" else min(config.bucket_bytes, _MOST_ON_CPU)
        )
        opened = PackedBroadcast(specs, bucket_bytes, world.rank)
        if not specs or place is None:
            return opened
        group = open_group(channel, choice, "misc", place, device, 1, min(bucket_bytes, opened.nbytes))
        with closed_on_error(group):
            group.connect_broadcast(0)
            # A tensor that is larger than a bucket has one of its own, which is not held.
            held = [size for size in opened._sizes if size <= aligned(bucket_bytes) + CHECKSUM_BYTES]
            opened._buckets = Buckets(
                group,
                world.rank,
                config.verify,
                channel.turn,
                max(held, default=0),
                len(held) if choice.kind == "network" and not sleeps else 0,
            )
        return opened

    @property
    def held_bytes(self) -> int:
        """Bytes of buckets, and of its group's own, which are held between refits."""
        return self._buckets.nbytes if self._buckets is not None else 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the other buckets at their most, which are taken anew in each refit."""
        if self._buckets is None:
            return 0
        sizes = [0 if self._buckets.holds(size) else size for size in self._sizes]
        return max((sum(sizes[i : i + AT_ONCE]) for i in range(len(sizes))), default=0)

    def close(self, *, failed: bool = False) -> None:
        """Close the group; safe to call twice. ``failed``: peers may be gone."""
        buckets, self._buckets = self._buckets, None
        if buckets is not None:
            buckets.close(failed=failed)

    def send(self, weights: Iterator[tuple[str, torch.Tensor]], clock: StageClock) -> None:
        """Draw the tensors from a trainer's export and broadcast them; a drain on ranks without a group.

        Raises:
            RefitMismatch: the export yields another tensor than the specs say, or ends early, or goes on.
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        for index, (bucket, size) in enumerate(zip(self._layout, self._sizes, strict=True)):
            buffer = None
            if self._buckets is not None:
                with clock.stage("misc"), clock.waiting():
                    buffer = self._buckets.to_pack(size)
            with clock.stage("export"):
                for spec, offset in bucket.slots:
                    name, tensor = next(weights, ("", None))
                    self._check(spec, name, tensor)
                    if buffer is not None and tensor is not None:
                        _slot(buffer, spec, offset).copy_(tensor)
            if self._buckets is not None and buffer is not None:
                if self._buckets.checks(index, len(self._layout)):
                    with clock.stage("verify"):
                        self._buckets.checksum(buffer[:-CHECKSUM_BYTES], _sums(buffer))
                with clock.stage("misc"):
                    self._buckets.send(buffer)
        if self._buckets is not None:
            with clock.stage("misc"), clock.waiting():
                self._buckets.drain()
            self._buckets.refits += 1
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
        """Yield the tensors as they arrive.

        A loader may keep what it gets. On a GPU, one that uses it on another stream than the current one has to keep it until
        that stream is done.
        """
        self.verified_bytes = 0
        buckets, last = self._buckets, len(self._layout) - 1
        assert buckets is not None, "only ranks with a group receive"
        with clock.stage("misc"):
            buckets.receive(self._sizes[0])
        for index, bucket in enumerate(self._layout):
            with clock.stage("misc"), clock.waiting():
                buffer = buckets.arrived()
            # A loader's own variable still holds the last tensor of the bucket before, until it has the first one of this.
            waits = index < last and not buckets.free()
            if index < last and not waits:
                with clock.stage("misc"):
                    buckets.receive(self._sizes[index + 1])
            if buckets.checks(index, len(self._layout)):
                with clock.stage("verify"):
                    names = [spec.name for spec, _ in bucket.slots]
                    buckets.compare(buffer[:-CHECKSUM_BYTES], _sums(buffer), names)
                self.verified_bytes += sum(spec.nbytes for spec, _ in bucket.slots)
            for spec, offset in bucket.slots:
                yield spec.name, _slot(buffer, spec, offset)
                if waits:
                    waits = False
                    with clock.stage("misc"):
                        buckets.receive(self._sizes[index + 1])
        buckets.refits += 1

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


def _sums(buffer: torch.Tensor) -> torch.Tensor:
    """The slot of a bucket's checksum."""
    return buffer[-CHECKSUM_BYTES:].view(torch.int64)
