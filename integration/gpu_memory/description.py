"""What a rank tells its peers of its memory: plain data, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RefitMismatch
from ..packing import Strided

# Bounds of what a peer may say; far beyond any real model.
_MOST_ALLOCATIONS = 1 << 16
_MOST_CHUNKS = 1 << 18
_MOST_VIEWS = 1 << 24
_MOST_DIMS = 8
_MOST_BYTES = 1 << 46
_MOST_SECONDS = 1e9
_ITEM_SIZES = (1, 2, 4, 8, 16)
# A classic CUDA IPC handle: 64 bytes.
HANDLE_HEX = 128


@dataclass(frozen=True)
class Allocation:
    """Device memory that is opened as a whole.

    Attributes:
        base: its first address in the exporting process.
        size: bytes.
        handle: classic CUDA IPC handle in hex; empty for virtual-memory chunks.
        chunks: sizes of the chunks that are mapped there one after another, in bytes; their file descriptors are
            fetched from the exporter, numbered over all its allocations.
        lent: whether peers have to let go of it after each refit, since its owner gives it back to the driver in between.
        identity: numbers that other memory at these addresses would not have; of what is not lent.
    """

    base: int
    size: int
    handle: str = ""
    chunks: tuple[int, ...] = ()
    lent: bool = False
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
    """Where one sender writes: its segments in the order of the plan, its checksums, and last its bell."""

    views: tuple[View, ...]
    checksums: Place
    bell: Place


@dataclass(frozen=True)
class Description:
    """A rank's memory.

    Attributes:
        process: name of the process; equal only inside one.
        device: UUID of the GPU.
        timeout_s: seconds for which it waits for its senders.
        allocations: all that ``inboxes`` point into.
        address: of the exporter's descriptor server; empty if no allocation has chunks.
        token: to be shown there, hex.
        inboxes: by the rank that sends; none on trainer ranks.
    """

    process: str
    device: str
    timeout_s: float
    allocations: tuple[Allocation, ...] = ()
    address: str = ""
    token: str = ""
    inboxes: Mapping[int, Inbox] = field(default_factory=dict)

    @property
    def lent(self) -> bool:
        """Whether some of the memory is lent."""
        return any(a.lent for a in self.allocations)

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
                "checksums": [inbox.checksums.allocation, inbox.checksums.offset],
                "bell": [inbox.bell.allocation, inbox.bell.offset],
            }
        return {
            "process": self.process,
            "device": self.device,
            "timeout_s": self.timeout_s,
            "allocations": [
                [a.base, a.size, a.handle, list(a.chunks), a.lent, list(a.identity)] for a in self.allocations
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
        try:
            return _read(data)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise RefitMismatch(
                f"refit rank {rank} describes its GPU memory in a form that can't be read ({error}); nothing was "
                "written. Do all ranks run the same rlrefit?",
                stage="connect",
                rank=rank,
            ) from error

    def same_places(self, other: Description) -> bool:
        """Whether another description of this peer's tells of the same memory, or of other memory at the same addresses where
        it is lent."""
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


def _read(data: object) -> Description:
    data = _object(data)
    allocations = tuple(_allocation(row) for row in _list(data["allocations"], _MOST_ALLOCATIONS))
    if sum(len(a.chunks) for a in allocations) > _MOST_CHUNKS:
        raise ValueError("too many chunks")
    layouts = [_layout(row) for row in _list(data["layouts"], _MOST_VIEWS)]
    inboxes = {}
    for source, row in _object(data["inboxes"]).items():
        inbox = _object(row)
        columns = [_list(inbox[name], _MOST_VIEWS) for name in ("layout", "allocation", "offset")]
        views = tuple(
            View(
                _place([allocation, offset], allocations),
                layouts[_int(layout, len(layouts))][1:],
                layouts[layout][0],
            )
            for layout, allocation, offset in zip(*columns, strict=True)
        )
        inboxes[int(source)] = Inbox(
            views, _place(inbox["checksums"], allocations), _place(inbox["bell"], allocations)
        )
    return Description(
        process=_text(data["process"]),
        device=_text(data["device"]),
        timeout_s=_seconds(data["timeout_s"]),
        allocations=allocations,
        address=_text(data["address"]),
        token=_hex(data["token"]),
        inboxes=inboxes,
    )


def _allocation(row: object) -> Allocation:
    base, size, handle, chunks, lent, identity = _list(row, 6)
    sizes = tuple(_int(n, _MOST_BYTES) for n in _list(chunks, _MOST_CHUNKS))
    if len(_hex(handle)) != (0 if sizes else HANDLE_HEX):
        raise ValueError("an allocation has one classic handle or some chunks")
    if sizes and (sum(sizes) != size or 0 in sizes):
        raise ValueError("an allocation is not as large as its chunks")
    numbers = tuple(_int(n, 1 << 64) for n in _list(identity, _MOST_CHUNKS))
    return Allocation(_int(base, 1 << 64), _int(size, _MOST_BYTES), handle, sizes, _bool(lent), numbers)


def _layout(row: object) -> tuple[int, ...]:
    itemsize, *strides = _list(row, 1 + _MOST_DIMS)
    if itemsize not in _ITEM_SIZES:
        raise ValueError(f"items of {itemsize!r} bytes")
    return (itemsize, *(_int(stride, _MOST_BYTES) for stride in strides))


def _place(row: object, allocations: Sequence[Allocation]) -> Place:
    index, offset = _list(row, 2)
    return Place(_int(index, len(allocations)), _int(offset, allocations[index].size))


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value


def _list(value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(f"no list of at most {most} entries")
    return value


def _int(value: object, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"{value!r} is no whole number from 0 to {below - 1}")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MOST_SECONDS:
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise TypeError("no short text")
    return value


def _hex(value: object) -> str:
    bytes.fromhex(_text(value))
    return str(value)
