"""The buckets of a packed broadcast: while one travels, the next one is packed, or the one before is handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.group import Exchange, Group
from ..errors import VerificationError, end_all
from ..packing import Checksums, make_checksums

# Buckets of a rank: one travels, another one is packed or handed out.
AT_ONCE = 2
# Buffers whose prepared checksums are kept; an allocator that gives other addresses each time must not fill memory.
_MOST_PLACES = 256
_STAGE = "misc"
# What counts a storage: its tensor here, and the question itself.
_OWN_USES = 2


class Buckets:
    """Sends buckets from rank 0 of a group to all its other ranks, at most two at a time.

    Rank 0 calls :meth:`to_pack` and :meth:`send` for each bucket, and :meth:`drain` at last. The others call :meth:`receive`
    and :meth:`arrived` for each. A bucket is packed and handed out on the caller's current stream, and travels on a stream of
    its own. Whoever waits for other ranks waits on the host, where the wait has a limit, and sees that a rank gives up.

    Args:
        group: of the sender and all receivers; closed with the buckets.
        rank: of the refit world, for errors.
        verify: ``off``, ``sampled`` or ``full``.
        turn: at which bucket sampled checks begin; the same on all ranks.
        room: bytes of a bucket that is held between refits.
        held: buckets that are held, two at most. Without them, and where a bucket is larger, each is memory of its own.

    Attributes:
        refits: that have ended.
        nbytes: of the buckets that are held.
    """

    def __init__(self, group: Group, rank: int, verify: str, turn: int, room: int = 0, held: int = 0):
        self.device = group.device
        self.refits = 0
        self._group = group
        self._rank = rank
        self._verify = verify
        self._turn = turn
        self._room = room
        self._held = [self._new(room) for _ in range(min(AT_ONCE, held))]
        self._taken = 0
        # What was handed out last at each place, where it is memory of its own.
        self._given: list[StorageWeakRef | None] = [None] * AT_ONCE
        self._travelling: deque[tuple[Exchange, torch.Tensor, int]] = deque()
        # Each bucket's wire is a stream of its own: a wait for the first of two must not wait for the second.
        on_gpu = self.device.type == "cuda"
        self._wires = [torch.cuda.Stream(self.device) for _ in range(AT_ONCE)] if on_gpu else []
        self._checksums_at: dict[tuple[int, int], Checksums] = {}

    @property
    def nbytes(self) -> int:
        """Of the buckets that are held, the group's own among them."""
        return self._group.staging_bytes + sum(one.numel() for one in self._held)

    def to_pack(self, nbytes: int) -> torch.Tensor:
        """The sender's next bucket, uint8 ``[nbytes]``, once the bucket before the last has left.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        while len(self._travelling) >= AT_ONCE:
            self._finish()
        return self._bucket(nbytes)

    def send(self, bucket: torch.Tensor) -> None:
        """Start to send what the current stream packs into a bucket of :meth:`to_pack`.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        self._start(bucket)

    def drain(self) -> None:
        """Wait until all buckets have left.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        while self._travelling:
            self._finish()

    def holds(self, nbytes: int) -> bool:
        """Whether a bucket of this size is held between refits."""
        return bool(self._held) and nbytes <= self._room

    def free(self) -> bool:
        """Whether nobody uses what was handed out before the last bucket; then no third one is in use beside the next."""
        place = self._taken % AT_ONCE
        given = self._given[place]
        # Views count, whoever has them; what is kept in another process does not.
        held = place < len(self._held) and _uses(self._held[place]) > _OWN_USES
        return not held and (given is None or given.expired())

    def receive(self, nbytes: int) -> None:
        """Start to receive a bucket, behind what the current stream does with the others.

        Whoever keeps a part of an earlier one keeps it: then this one is new memory.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        place = self._taken % AT_ONCE
        if place < len(self._held) and not self.free():
            self._held[place] = self._new(self._room)
        self._start(self._bucket(nbytes))

    def arrived(self) -> torch.Tensor:
        """Wait for the first bucket that has not been waited for, and return it.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """
        place, bucket = self._travelling[0][2], self._finish()
        self._given[place] = None if self.holds(bucket.numel()) else StorageWeakRef(bucket.untyped_storage())
        if self._wires:
            # It may be freed after this stream's work, and have been taken on another one.
            bucket.record_stream(torch.cuda.current_stream(self.device))
        return bucket

    def checks(self, index: int, count: int) -> bool:
        """Whether bucket ``index`` of this refit is compared, of about ``count``."""
        sampled = index % count == (self._turn + self.refits) % count
        return self._verify == "full" or (self._verify == "sampled" and sampled)

    def checksum(self, raw: torch.Tensor, out: torch.Tensor) -> None:
        """Set ``out``, int64 ``[2]``, to the checksum of a bucket's bytes, on the current stream."""
        place = raw.data_ptr(), raw.numel()
        checksums = self._checksums_at.get(place)
        if checksums is None:
            checksums = make_checksums([(raw, 0)], raw.device)
            # On a GPU they know the bucket by its address, which is the same in the next refit.
            if raw.device.type == "cuda" and len(self._checksums_at) < _MOST_PLACES:
                self._checksums_at[place] = checksums
        checksums.compute(out)

    def compare(self, raw: torch.Tensor, sent: torch.Tensor, names: Sequence[str]) -> None:
        """Compare the bytes of a bucket that arrived with what was sent.

        Args:
            raw: the bytes.
            sent: their checksum, int64 ``[2]``, as it travelled.
            names: of the weights in the bucket.

        Raises:
            VerificationError: they differ; names the weights.
        """
        found = torch.empty(2, dtype=torch.int64, device=raw.device)
        self.checksum(raw, found)
        if not torch.equal(found, sent):
            raise VerificationError(
                f"a bucket of {len(names)} weights arrived with other bytes than were sent: {', '.join(names[:5])}"
                f"{' …' if len(names) > 5 else ''}. Nothing of it was given to the engine, which must not generate before "
                "the next refit. The network or a device's memory corrupts data: refit again, and replace the hardware if it "
                "comes back",
                stage="verify",
                rank=self._rank,
                parameter=names[0] if names else "",
            )

    def close(self, *, failed: bool = False) -> None:
        """Close the group and give the buckets back; safe to call twice. ``failed``: peers may be gone."""
        steps: list[Callable[[], object]] = [exchange.drop for exchange, _, _ in self._travelling]
        try:
            end_all([*steps, partial(self._group.close, failed=failed)])
        finally:
            # Only now: until the group has given up, what is under way may still write them.
            self._travelling.clear()
            self._held, self._checksums_at = [], {}

    def _bucket(self, nbytes: int) -> torch.Tensor:
        place, self._taken = self._taken % AT_ONCE, self._taken + 1
        held = self.holds(nbytes) and place < len(self._held)
        return self._held[place][:nbytes] if held else self._new(nbytes)

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _start(self, bucket: torch.Tensor) -> None:
        exchange, wire = self._group.prepare_broadcast(bucket, 0), (self._taken - 1) % AT_ONCE
        if self._wires:
            self._wires[wire].wait_stream(torch.cuda.current_stream(self.device))
        self._travelling.append((exchange, bucket, wire))
        with self._on(wire):
            exchange.start(_STAGE)

    def _finish(self) -> torch.Tensor:
        exchange, bucket, wire = self._travelling[0]
        # The host has seen the end, so that no stream needs to wait for it any more.
        with self._on(wire):
            self._group.finish(exchange, _STAGE)
        self._travelling.popleft()
        return bucket

    @contextmanager
    def _on(self, wire: int) -> Iterator[None]:
        # A stream's context brings its device.
        with torch.cuda.stream(self._wires[wire]) if self._wires else nullcontext():
            yield


def _uses(tensor: torch.Tensor) -> int:
    """Tensors that share a tensor's storage, itself and this question counted."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found
