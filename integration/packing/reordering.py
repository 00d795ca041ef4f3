"""Packed matrices that have landed as they are in a checkpoint, put in the order of a kernel in the same memory.

A group of matrices at a time is copied aside, and written back in order: bounded memory beside the weights, and a few launches for a
model. What orders are, and how they are found out, :mod:`..layout.codes` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..layout.codes import Tiling
from .rows import Table
from .tables import Launch

# What is copied aside at a time, unless a single matrix has more.
ASIDE_BYTES = 128 << 20
_UNIT = 16
_WORD = 4
# Units, words and bytes that one program handles, and its warps.
_ASIDE_TILE = 1024
_WORDS = 512
_LOOKED_AT = 16384
_WARPS = 4
# Bytes that a GPU reads together, whatever of them is wanted.
_SECTOR = 32
# Tiles that one program makes of quads.
_QUAD_TILES = 16


@dataclass(frozen=True, eq=False)
class Unordered:
    """A matrix that is to be put in order.

    Attributes:
        memory: contiguous, of this matrix alone; any dtype.
        rows: of it as it lands.
        columns: of it, in elements.
        bits: of an element, 4 or 8.
        tiling: the order.
        slot: which entry of ``choices`` says what becomes of its bytes; None if they stay as they are.
    """

    memory: torch.Tensor
    rows: int
    columns: int
    bits: int
    tiling: Tiling
    slot: int | None = None


class Reordering(Protocol):
    """Puts matrices in order; ``aside_bytes`` is the memory that it takes meanwhile."""

    aside_bytes: int

    def launch(self, maps: torch.Tensor, choices: torch.Tensor) -> None:
        """Put all in order; on a GPU, enqueue that on the current stream.

        Args:
            maps: uint8 ``[m, 256]``: what becomes of each byte.
            choices: int32 ``[slots]``: a row of ``maps`` for each slot.
        """


class LargestBytes(Protocol):
    """Finds the largest positive number among the E4M3 bytes of matrices."""

    def find(self, out: torch.Tensor) -> None:
        """Set ``out`` (int32 ``[slots]``) to the largest byte of each slot that stands for a positive number; 0 if there is none."""


def make_reordering(
    jobs: Sequence[Unordered], device: torch.device, interpret: bool = False, aside_bytes: int = ASIDE_BYTES
) -> Reordering:
    """Of ``jobs`` on ``device``. Their memory has to stay where it is.

    Args:
        jobs: all of whose matrices have memory of their own.
        device: of them.
        interpret: whether Triton interprets the kernels on a CPU, in tests.
        aside_bytes: what is copied aside at a time, unless a single matrix has more.

    Raises:
        ValueError: memory that the kernels can't take.
    """
    if device.type == "cuda" or interpret:
        return DeviceReordering(jobs, device, aside_bytes)
    return HostReordering(jobs)


def make_largest_bytes(
    matrices: Sequence[tuple[torch.Tensor, int]], device: torch.device, interpret: bool = False
) -> LargestBytes:
    """Of ``matrices``: contiguous bytes, and their slots; otherwise as :func:`make_reordering`."""
    if device.type == "cuda" or interpret:
        return DeviceLargestBytes(matrices, device)
    return HostLargestBytes(matrices)


class HostReordering:
    """Of CPU tensors, by torch."""

    aside_bytes = 0

    def __init__(self, jobs: Sequence[Unordered]):
        self._jobs = list(jobs)

    def launch(self, maps: torch.Tensor, choices: torch.Tensor) -> None:
        """As :meth:`Reordering.launch`."""
        for job in self._jobs:
            flat = job.memory.view(-1).view(torch.uint8)
            elements = torch.stack((flat & 0xF, flat >> 4), dim=-1).reshape(-1) if job.bits == 4 else flat
            if job.slot is not None:
                elements = maps[int(choices[job.slot])][elements.int()]
            tiling = job.tiling
            down, across = job.rows // tiling.rows, job.columns // tiling.columns
            tiles = elements.view(down, tiling.rows, across, tiling.columns).permute(0, 2, 1, 3)
            inside = tiles.reshape(down * across, tiling.elements)[:, torch.tensor(tiling.order)]
            numbers = torch.tensor(tiling.row_starts)[:, None] + torch.tensor(tiling.column_starts)
            made = torch.empty_like(inside)
            made[numbers.reshape(-1)] = inside
            if job.bits == 4:
                pairs = made.view(-1, 2)
                made = pairs[:, 0] | (pairs[:, 1] << 4)
            flat.copy_(made.view(-1))


class HostLargestBytes:
    """Of CPU tensors, by torch."""

    def __init__(self, matrices: Sequence[tuple[torch.Tensor, int]]):
        self._matrices = list(matrices)

    def find(self, out: torch.Tensor) -> None:
        """As :meth:`LargestBytes.find`."""
        out.zero_()
        for memory, slot in self._matrices:
            flat = memory.view(-1).view(torch.uint8)
            largest = torch.where(flat < 0x7F, flat, torch.zeros_like(flat)).amax()
            out[slot] = torch.maximum(out[slot], largest.int())


class DeviceReordering:
    """By Triton's kernels."""

    def __init__(self, jobs: Sequence[Unordered], device: torch.device, aside_bytes: int):
        self._device = device
        jobs = [_in_pairs(job) for job in jobs]
        for job in jobs:
            _check(job)
        # Tables of orders that jobs share are on the device once.
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        groups = list(_groups(jobs, aside_bytes))
        self.aside_bytes = max((sum(job.memory.nbytes for job in group) for group in groups), default=0)
        self._groups = [self._prepared(group) for group in groups]

    def launch(self, maps: torch.Tensor, choices: torch.Tensor) -> None:
        """As :meth:`Reordering.launch`."""
        aside = self._aside(self.aside_bytes)
        for set_aside, back in self._groups:
            set_aside(aside)
            for put_back in back:
                put_back(aside, maps, choices)

    def _aside(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _prepared(self, group: Sequence[Unordered]) -> tuple[Launch, list[Launch]]:
        from .reordering_kernels import set_aside

        sizes = [job.memory.nbytes for job in group]
        offsets = np.cumsum([0, *sizes])[:-1].tolist()
        like = self._aside(_UNIT), self._aside(256), torch.zeros(1, dtype=torch.int32, device=self._device)
        copied = [
            (job.memory.data_ptr(), job.memory.nbytes // _UNIT, at // _UNIT)
            for job, at in zip(group, offsets, strict=True)
        ]
        aside = Launch(
            set_aside,
            _WARPS,
            _table(copied, [-(-units // _ASIDE_TILE) for _, units, _ in copied]),
            (_ASIDE_TILE,),
            self._device,
            like[:1],
        )
        kinds: dict[_Kind, list[tuple[Unordered, int]]] = {}
        for job, offset in zip(group, offsets, strict=True):
            kinds.setdefault(_Kind.of(job), []).append((job, offset))
        return aside, [self._put_back(kind, found, like) for kind, found in kinds.items()]

    def _put_back(
        self, kind: _Kind, found: Sequence[tuple[Unordered, int]], like: tuple[torch.Tensor, ...]
    ) -> Launch:
        """Of jobs of one kind, with what is before each of them in the memory aside."""
        from .reordering_kernels import put_in_order, put_quads_in_order

        kernel, tiles = put_in_order, max(1, _WORDS // kind.words)
        constants: tuple[Any, ...] = (kind.bits, kind.words, tiles, kind.mapped, kind.paired)
        if kind.lanes:
            kernel, tiles = put_quads_in_order, _QUAD_TILES
            constants = kind.words // 4, kind.lanes, tiles, kind.wide
        rows, counts = [], []
        for job, offset in found:
            tiling = job.tiling
            down, across = len(tiling.row_starts), len(tiling.column_starts)
            quads = _quads(tiling.order, tiling.columns) if kind.lanes else None
            inside = (
                _places(tiling.order, tiling.columns)
                if quads is None
                else tuple(word for part in quads.sources for word in part)
            )
            rows.append(
                (
                    *(job.memory.data_ptr(), offset, job.columns, across, tiling.rows, tiling.columns),
                    *(self._on_device(t) for t in (tiling.row_starts, tiling.column_starts, inside)),
                    job.slot or 0,
                )
            )
            counts.append(down * -(-across // tiles))
        return Launch(kernel, _WARPS, _table(rows, counts), constants, self._device, like)

    def _on_device(self, numbers: tuple[int, ...]) -> int:
        """The address of these numbers, int32."""
        if numbers not in self._tables:
            self._tables[numbers] = torch.tensor(numbers, dtype=torch.int32, device=self._device)
        return self._tables[numbers].data_ptr()


class DeviceLargestBytes:
    """By Triton's kernel."""

    def __init__(self, matrices: Sequence[tuple[torch.Tensor, int]], device: torch.device):
        from .reordering_kernels import largest_bytes

        rows = [(memory.data_ptr(), memory.nbytes, slot) for memory, slot in matrices]
        counts = [-(-nbytes // _LOOKED_AT) for _, nbytes, _ in rows]
        like = torch.zeros(1, dtype=torch.int32, device=device)
        self._launch = Launch(largest_bytes, _WARPS, _table(rows, counts), (_LOOKED_AT,), device, (like,))

    def find(self, out: torch.Tensor) -> None:
        """As :meth:`LargestBytes.find`."""
        out.zero_()
        self._launch(out)


def _check(job: Unordered) -> None:
    memory, tiling = job.memory, job.tiling
    if memory.nbytes * 8 != job.rows * job.columns * job.bits or not memory.is_contiguous():
        raise ValueError(
            f"{list(memory.shape)} does not hold {job.rows} by {job.columns} elements in one piece"
        )
    if memory.nbytes % _UNIT or memory.data_ptr() % _UNIT:
        raise ValueError(f"{memory.nbytes} bytes at {memory.data_ptr():#x} have no whole units of {_UNIT}")
    if job.rows * job.columns >= 1 << 31:
        raise ValueError(f"{job.rows} by {job.columns} elements are more than the kernel counts")
    if (len(tiling.row_starts) * tiling.rows, len(tiling.column_starts) * tiling.columns) != (
        job.rows,
        job.columns,
    ):
        raise ValueError(f"the tiles are not those of {job.rows} by {job.columns} elements")


def _groups(jobs: Sequence[Unordered], most: int) -> Iterable[list[Unordered]]:
    group: list[Unordered] = []
    held = 0
    for job in jobs:
        if group and held + job.memory.nbytes > most:
            yield group
            group, held = [], 0
        group.append(job)
        held += job.memory.nbytes
    if group:
        yield group


@dataclass(frozen=True)
class _Kind:
    """What a launch has in common.

    Attributes:
        bits: of an element.
        words: of a tile.
        mapped: whether bytes become other bytes.
        paired: as :func:`_paired` says.
        lanes: as :class:`Quads` says; 0 if the order has none.
        wide: whether a row of a tile of quads has neighbouring words, as many as memory is read at a time.
    """

    bits: int
    words: int
    mapped: bool
    paired: bool
    lanes: int
    wide: bool

    @staticmethod
    def of(job: Unordered) -> _Kind:
        """The kind of a matrix."""
        tiling, mapped, halves = job.tiling, job.slot is not None, job.bits == 4
        quads = _quads(tiling.order, tiling.columns) if halves and not mapped else None
        return _Kind(
            job.bits,
            tiling.elements * job.bits // (8 * _WORD),
            mapped,
            halves and _paired(tiling.order, tiling.columns),
            0 if quads is None else quads.lanes,
            quads is not None and tiling.columns * job.bits >= 8 * _SECTOR,
        )


@dataclass(frozen=True)
class Quads:
    """An order in which four words are made of four loaded ones: word ``u`` has byte ``u`` of each of them, paired.

    Attributes:
        sources: for each place of a byte and each quad the loaded word: its row, and in the half below its number in the row.
        lanes: a power of two: the words ``u`` of as many quads lie side by side, and those of ``u + 1`` behind them.
    """

    sources: tuple[tuple[int, ...], ...]
    lanes: int


def _in_pairs(job: Unordered) -> Unordered:
    """A matrix of bytes of which pairs stay together, as numbers of 16 bits have them, as one of such numbers."""
    tiling = job.tiling
    halved = _halved(tiling) if job.bits == 8 and job.slot is None else None
    return job if halved is None else replace(job, bits=16, columns=job.columns // 2, tiling=halved)


# Thousands of matrices share an order.
@lru_cache(maxsize=64)
def _halved(tiling: Tiling) -> Tiling | None:
    firsts, seconds = tiling.order[::2], tiling.order[1::2]
    if tiling.columns % 2 or any(a % 2 or b != a + 1 for a, b in zip(firsts, seconds, strict=True)):
        return None
    return replace(tiling, columns=tiling.columns // 2, order=tuple(at // 2 for at in firsts))


@lru_cache(maxsize=64)
def _paired(order: tuple[int, ...], columns: int) -> bool:
    """Whether the two elements of each byte lie four places apart in one word, the low one first."""
    words = [order[i : i + 8] for i in range(0, len(order), 8)]
    return columns % 2 == 0 and all(
        word[p] % 2 == 0 and word[p + 4] == word[p] + 1 for word in words for p in range(4)
    )


@lru_cache(maxsize=64)
def _quads(order: tuple[int, ...], columns: int) -> Quads | None:
    """The quads of an order of elements of 4 bits; None if it has another form."""
    if columns % 8 or not _paired(order, columns):
        return None
    # Where the word of each byte of a quad lies, by the quad's loaded words.
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for word in range(len(order) // 8):
        elements = order[8 * word : 8 * word + 4]
        numbers = {at % 8 // 2 for at in elements}
        if len(numbers) > 1:
            return None
        found.setdefault(tuple(at // 8 for at in elements), {})[numbers.pop()] = word
    if any(len(words) != 4 for words in found.values()):
        return None
    quads = sorted(found, key=lambda loaded: found[loaded][0])
    lanes = found[quads[0]][1] - found[quads[0]][0]
    if lanes < 1 or lanes & (lanes - 1) or len(quads) & (len(quads) - 1):
        return None
    for q, loaded in enumerate(quads):
        if any(found[loaded][u] != q // lanes * 4 * lanes + u * lanes + q % lanes for u in range(4)):
            return None
    width = columns // 8
    sources = tuple(tuple(at // width << 16 | at % width for at in part) for part in zip(*quads, strict=True))
    return Quads(sources, lanes)


@lru_cache(maxsize=64)
def _places(order: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """Row and column of each place's element, in the halves of a word."""
    return tuple(at // columns << 16 | at % columns for at in order)


def _table(rows: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Table:
    """Rows with the number of their first program behind them, and the row of each program."""
    firsts = np.cumsum([0, *counts])[:-1]
    table: npt.NDArray[np.int64] = np.column_stack([np.array(rows, dtype=np.int64), firsts])
    return Table(
        _UNIT, False, np.ascontiguousarray(table), np.repeat(np.arange(len(rows), dtype=np.int32), counts), 0
    )
