"""How a rank describes its memory to its peers: plain data, which they check before they open anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..control.decoding import decode_from
from ..errors import RefitMismatch
from ..layout import Box
from ..packing import Strided

# Limits of what a peer may say, far above any real model.
_MOST_CHARACTERS = 256
_MOST_WORDS = 4096
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
class Encoded:
    """What a peer that reads a view makes of it.

    Attributes:
        encoding: index among the description's.
        shape: of the view, which is all that the rank holds there.
        window: the segment, in the coordinates of what is encoded of the view.
        global_scale: where the weight's is, if the encoding has one.
    """

    encoding: int
    shape: tuple[int, ...]
    window: Box
    global_scale: Place | None = None


@dataclass(frozen=True)
class View:
    """Strided memory of an allocation; its shape is the segment's, which both sides know, if it is not encoded."""

    place: Place
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    encoded: Encoded | None = None


@dataclass(frozen=True)
class Shared:
    """What one peer writes or reads: the segments in the order of the plan, the checksums, and last the signal."""

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
        allocations: all that ``shared`` points into.
        address: of the exporter's descriptor server; empty if no allocation has chunks.
        token: of that server, hex.
        shared: by the peer: by the senders that write a receiver's memory, or by the receivers that read a sender's.
        pulls: why this rank reads its senders' memory, where they do not write its own; empty if they do.
        encodings: of what is encoded as it is read, as plain data.
        works_on_portions: whether a receiver is to hear of each portion that has landed.
    """

    process: str
    device: str
    timeout_s: float
    allocations: tuple[Allocation, ...] = ()
    address: str = ""
    token: str = ""
    shared: Mapping[int, Shared] = field(default_factory=dict)
    pulls: str = ""
    encodings: tuple[object, ...] = ()
    works_on_portions: bool = False

    @property
    def sleeps(self) -> bool:
        """Whether some of the memory sleeps."""
        return any(a.sleeps for a in self.allocations)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Views are given by columns, since thousands of them share few strides."""
        layouts: dict[tuple[int, ...], int] = {}
        shared: dict[str, Any] = {}
        for peer, one in self.shared.items():
            kinds = [layouts.setdefault((v.itemsize, *v.strides), len(layouts)) for v in one.views]
            shared[str(peer)] = {
                "layout": kinds,
                "allocation": [v.place.allocation for v in one.views],
                "offset": [v.place.offset for v in one.views],
                "encoded": {
                    str(i): _flat(v.encoded) for i, v in enumerate(one.views) if v.encoded is not None
                },
                "checksums": asdict(one.checksums),
                "signal": asdict(one.signal),
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
            "shared": shared,
            "pulls": self.pulls,
            "encodings": list(self.encodings),
            "works_on_portions": self.works_on_portions,
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
            shared = {peer: told.shared_with(columns) for peer, columns in told.shared.items()}
        except ValueError as error:
            raise RefitMismatch(
                f"refit rank {rank} describes its GPU memory with places that are not in it: {error}. Nothing was written; "
                "do all ranks run the same rlrefit?",
                stage="connect",
                blamed=rank,
            ) from error
        return Description(
            told.process,
            told.device,
            told.timeout_s,
            told.allocations,
            told.address,
            told.token,
            shared,
            told.pulls,
            tuple(told.encodings),
            told.works_on_portions,
        )

    def same_places(self, other: Description) -> bool:
        """Whether another description of this peer's tells of the same memory, or of other memory at the same addresses where
        it sleeps."""
        # Memory that slept has another handle each time.
        allocations = tuple(
            replace(theirs, handle=ours.handle) if theirs.sleeps and theirs.handle and ours.handle else theirs
            for ours, theirs in zip(self.allocations, other.allocations, strict=False)
        )
        same = replace(other, address=self.address, token=self.token, allocations=allocations)
        return len(other.allocations) == len(self.allocations) and same == self

    def memory(self, view: View, shape: Sequence[int], bases: Sequence[int]) -> Strided:
        """A view as memory of this process.

        Args:
            view: of this description.
            shape: of the segment, or of the view if it is encoded.
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
        found = Strided(address, tuple(shape), view.strides, view.itemsize)
        if found.repeats:
            raise ValueError("a segment has several elements at one place; was its parameter expanded?")
        return found

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
    """What is shared with one peer: the views by columns, since thousands of them share few layouts."""

    layout: list[int]
    allocation: list[int]
    offset: list[int]
    encoded: dict[int, list[int]]
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
    shared: dict[int, _Columns]
    pulls: str
    encodings: list[object]
    works_on_portions: bool

    def __post_init__(self) -> None:
        for text in (self.process, self.device, self.address, self.token):
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"a text of {len(text)} characters")
        if len(self.pulls) > _MOST_WORDS:
            raise ValueError(f"a reason of {len(self.pulls)} characters")
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

    def shared_with(self, columns: _Columns) -> Shared:
        """What is shared with one peer, with all its places checked."""
        views = []
        for index, (number, allocation, offset) in enumerate(
            zip(columns.layout, columns.allocation, columns.offset, strict=True)
        ):
            _require_within(number, len(self.layouts))
            itemsize, *strides = self.layouts[number]
            encoded = None
            if index in columns.encoded:
                encoded = _unflat(columns.encoded[index], len(strides))
                _require_within(encoded.encoding, len(self.encodings))
                if encoded.global_scale is not None:
                    self._checked(encoded.global_scale)
            views.append(View(self._checked(Place(allocation, offset)), tuple(strides), itemsize, encoded))
        return Shared(tuple(views), self._checked(columns.checksums), self._checked(columns.signal))

    def _checked(self, place: Place) -> Place:
        _require_within(place.allocation, len(self.allocations))
        _require_within(place.offset, self.allocations[place.allocation].size)
        return place


def _flat(encoded: Encoded) -> list[int]:
    scale = encoded.global_scale
    place = () if scale is None else (scale.allocation, scale.offset)
    return [encoded.encoding, *encoded.shape, *(bound for part in encoded.window for bound in part), *place]


def _unflat(numbers: Sequence[int], dims: int) -> Encoded:
    """Inverse of :func:`_flat`."""
    end = 1 + 3 * dims
    if len(numbers) not in (end, end + 2):
        raise ValueError(f"{len(numbers)} numbers for what is encoded of {dims} dimensions")
    encoding, shape, bounds = numbers[0], tuple(numbers[1 : 1 + dims]), numbers[1 + dims : end]
    for bound in (*shape, *bounds):
        _require_within(bound, _MOST_BYTES)
    window = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    return Encoded(encoding, shape, window, Place(*numbers[end:]) if numbers[end:] else None)


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
