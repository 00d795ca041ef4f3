"""How a rank describes its memory to its peers: plain data, which they check before they open anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..control.decoding import decode_from
from ..errors import RefitMismatch
from ..packing import Strided

# Limits of what a peer may say, far above any real model.
_MOST_CHARACTERS = 256
_MOST_DIMS = 8
_MOST_BYTES = 1 << 46
_MOST_SECONDS = 1e9
_ITEM_SIZES = (1, 2, 4, 8, 16)
# A classic CUDA IPC handle: 64 bytes.
HANDLE_HEX = 128


@dataclass(frozen=True)
class Allocation:
    """Device memory that a peer opens as a whole.

    Attributes:
        base: its first address in the exporting process.
        size: bytes.
        handle: classic CUDA IPC handle in hex; empty for virtual-memory chunks.
        chunks: sizes of the chunks that are mapped there one after another, in bytes; their file descriptors are
            fetched from the exporter, numbered over all its allocations.
        sleeps: whether its owner gives it back to the driver between refits, so that peers have to unmap it after each.
        identity: numbers that no other memory at these addresses has; empty for memory that sleeps.
    """

    base: int
    size: int
    handle: str = ""
    chunks: tuple[int, ...] = ()
    sleeps: bool = False
    identity: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Memory of an allocation, by its index and a byte offset."""

    allocation: int
    offset: int


@dataclass(frozen=True)
class View:
    """Strided memory of an allocation; its shape is the segment's, which both sides know."""

    place: Place
    strides: tuple[int, ...]  # in bytes
    itemsize: int


@dataclass(frozen=True)
class Inbox:
    """Where one sender writes: its segments in the order of the plan, its checksums, and last its signal."""

    views: tuple[View, ...]
    checksums: Place
    signal: Place


@dataclass(frozen=True)
class Description:
    """A rank's memory.

    Attributes:
        process: name of the process.
        device: UUID of the GPU.
        timeout_s: seconds for which it waits for its senders.
        allocations: all that ``inboxes`` point into.
        address: of the exporter's descriptor server; empty if no allocation has chunks.
        token: of that server, hex.
        inboxes: by the sending rank; none on trainer ranks.
    """

    process: str
    device: str
    timeout_s: float
    allocations: tuple[Allocation, ...] = ()
    address: str = ""
    token: str = ""
    inboxes: Mapping[int, Inbox] = field(default_factory=dict)

    @property
    def sleeps(self) -> bool:
        """Whether some of the memory sleeps."""
        return any(a.sleeps for a in self.allocations)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Views are given by columns, since thousands of them share few strides."""
        layouts: dict[tuple[int, ...], int] = {}
        inboxes: dict[str, Any] = {}
        for source, inbox in self.inboxes.items():
            kinds = [layouts.setdefault((v.itemsize, *v.strides), len(layouts)) for v in inbox.views]
            inboxes[str(source)] = {
                "layout": kinds,
                "allocation": [v.place.allocation for v in inbox.views],
                "offset": [v.place.offset for v in inbox.views],
                "checksums": asdict(inbox.checksums),
                "signal": asdict(inbox.signal),
            }
        return {
            "process": self.process,
            "device": self.device,
            "timeout_s": self.timeout_s,
            "allocations": [
                {**asdict(a), "chunks": list(a.chunks), "identity": list(a.identity)}
                for a in self.allocations
            ],
            "address": self.address,
            "token": self.token,
            "layouts": [list(layout) for layout in layouts],
            "inboxes": inboxes,
        }

    @staticmethod
    def from_json(data: object, rank: int) -> Description:
        """Inverse of :meth:`to_json`.

        Args:
            data: as read from a peer; nothing in it is trusted.
            rank: the peer.

        Raises:
            RefitMismatch: the data is not of the form that :meth:`to_json` gives, or beyond any sensible size.
        """
        told = decode_from(_Told, data, rank, f"refit rank {rank}", "its GPU memory", stage="connect")
        try:
            inboxes = {source: told.inbox(columns) for source, columns in told.inboxes.items()}
        except ValueError as error:
            raise RefitMismatch(
                f"refit rank {rank} describes its GPU memory with places that are not in it: {error}. Nothing was written; "
                "do all ranks run the same rlrefit?",
                stage="connect",
                blamed=rank,
            ) from error
        return Description(
            told.process, told.device, told.timeout_s, told.allocations, told.address, told.token, inboxes
        )

    def same_places(self, other: Description) -> bool:
        """Whether another description of this peer's tells of the same memory, or of other memory at the same addresses where
        it sleeps."""
        return replace(other, address=self.address, token=self.token) == self

    def target(self, view: View, shape: Sequence[int], bases: Sequence[int]) -> Strided:
        """A view as memory of this process.

        Args:
            view: of this description.
            shape: of the segment.
            bases: address of each allocation as it is mapped here.

        Raises:
            ValueError: it has another number of dimensions, reaches out of its allocation, or has several elements
                at one place.
        """
        if len(view.strides) != len(shape):
            raise ValueError(f"{len(view.strides)} strides for a segment of shape {list(shape)}")
        last = sum((n - 1) * stride for n, stride in zip(shape, view.strides, strict=True))
        if view.place.offset + last + view.itemsize > self.allocations[view.place.allocation].size:
            raise ValueError("a segment reaches out of its allocation")
        address = bases[view.place.allocation] + view.place.offset
        target = Strided(address, tuple(shape), view.strides, view.itemsize)
        if target.repeats:
            raise ValueError("a segment has several elements at one place; was its parameter expanded?")
        return target

    def region(self, place: Place, nbytes: int, bases: Sequence[int]) -> int:
        """The address of ``nbytes`` at ``place``, as mapped here.

        Raises:
            ValueError: they reach out of the allocation.
        """
        if place.offset + nbytes > self.allocations[place.allocation].size:
            raise ValueError("a buffer reaches out of its allocation")
        return bases[place.allocation] + place.offset


@dataclass(frozen=True)
class _Columns:
    """The views of an inbox by columns, since thousands of them share few layouts."""

    layout: list[int]
    allocation: list[int]
    offset: list[int]
    checksums: Place
    signal: Place


@dataclass(frozen=True)
class _Told:
    """A :class:`Description` as it travels; ``layouts`` are the size of an item and the strides."""

    process: str
    device: str
    timeout_s: float
    allocations: tuple[Allocation, ...]
    address: str
    token: str
    layouts: list[list[int]]
    inboxes: dict[int, _Columns]

    def __post_init__(self) -> None:
        for text in (self.process, self.device, self.address, self.token):
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"a text of {len(text)} characters")
        bytes.fromhex(self.token)
        for allocation in self.allocations:
            _check(allocation)
        if not 0 < self.timeout_s < _MOST_SECONDS:
            raise ValueError(f"{self.timeout_s!r} is no time in seconds")
        for itemsize, *strides in self.layouts:
            if itemsize not in _ITEM_SIZES or len(strides) > _MOST_DIMS:
                raise ValueError(f"items of {itemsize} bytes in {len(strides)} dimensions")
            for stride in strides:
                _require_within(stride, _MOST_BYTES)

    def inbox(self, columns: _Columns) -> Inbox:
        """One inbox, with all its places checked."""
        views = []
        for number, allocation, offset in zip(
            columns.layout, columns.allocation, columns.offset, strict=True
        ):
            _require_within(number, len(self.layouts))
            itemsize, *strides = self.layouts[number]
            views.append(View(self._checked(Place(allocation, offset)), tuple(strides), itemsize))
        return Inbox(tuple(views), self._checked(columns.checksums), self._checked(columns.signal))

    def _checked(self, place: Place) -> Place:
        _require_within(place.allocation, len(self.allocations))
        _require_within(place.offset, self.allocations[place.allocation].size)
        return place


def _check(allocation: Allocation) -> None:
    _require_within(allocation.base, 1 << 64)
    _require_within(allocation.size, _MOST_BYTES)
    for number in allocation.identity:
        _require_within(number, 1 << 64)
    bytes.fromhex(allocation.handle)
    if len(allocation.handle) != (0 if allocation.chunks else HANDLE_HEX):
        raise ValueError("an allocation has one classic handle or some chunks")
    if allocation.chunks and (sum(allocation.chunks) != allocation.size or min(allocation.chunks) < 1):
        raise ValueError("an allocation is not as large as its chunks")


def _require_within(value: int, below: int) -> None:
    if not 0 <= value < below:
        raise ValueError(f"{value} is not between 0 and {below - 1}")
