"""Segment tables on a CUDA device, and their launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .rows import COLUMNS, Ints, Table, build_tables, collapse
from .strided import Strided

# Units that one program moves, and its warps: the fastest on an H100 of those tried (16 KiB and 8 KiB in the
# widest unit; 98% and 92-96% of the device's copy rate for whole weights and for columns of 384 bytes).
_COPY_TILE, _COPY_WARPS = 1024, 8
_CHECKSUM_TILE, _CHECKSUM_WARPS = 512, 4
# Of up to 16 elements each.
_CAST_TILE = 512
# So few programs that they leave room to what a refit sends meanwhile.
_MAGNITUDE_TILE, _MAGNITUDE_WARPS, _MAGNITUDE_PROGRAMS = 512, 4, 264
# Whose numbers the kernels read; they cast between any two.
FLOAT_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Launch:
    """One kernel launch with its table on the device.

    It is compiled when it is made, so that the first refit does not wait for the compiler, and launched
    without Triton's look-up of the variant, which would cost more than the launch.
    """

    def __init__(
        self,
        kernel: Any,
        warps: int,
        table: Table,
        constants: tuple[Any, ...],
        device: torch.device,
        out: tuple[torch.Tensor, ...],
        most_programs: int | None = None,
        most_registers: int | None = None,
    ):
        self._tensors = (torch.from_numpy(table.tiles).to(device), torch.from_numpy(table.rows).to(device))
        self._constants = constants
        self.tiles = len(table.tiles)
        programs = min(self.tiles, most_programs or self.tiles)
        if device.type == "cuda":
            with torch.cuda.device(device):
                compiled = kernel.warmup(
                    *(*self._tensors, *out, *constants),
                    grid=(programs,),
                    num_warps=warps,
                    maxnreg=most_registers,
                )
                self._run = compiled[(programs, 1, 1)]
        else:  # Triton's interpreter, in tests
            self._run = partial(kernel[(programs,)], num_warps=warps)

    def __call__(self, *out: torch.Tensor) -> None:
        self._run(*self._tensors, *out, *self._constants)


class Launches:
    """Kernel launches that write memory that stays in place, prepared once; ``nbytes`` of it."""

    def __init__(self, launches: Sequence[Launch], nbytes: int):
        self._launches = launches
        self.nbytes = nbytes

    def launch(self) -> None:
        """Enqueue them on the current stream."""
        for launch in self._launches:
            launch()


class CopyTable(Launches):
    """Copies between strided memory, prepared once and launched at every refit.

    Addresses must be reachable from ``device``: its own memory, page-locked host memory, or a peer's that is mapped. There is one
    kernel for each unit width that occurs.
    """

    @staticmethod
    def build(pairs: Iterable[tuple[Strided, Strided]], device: torch.device) -> CopyTable:
        """A table of (source, destination) pairs.

        Raises:
            ValueError: a source and a destination of different shapes or item sizes, or a destination that has
                several elements at one place.
        """
        return CopyTable.of(copy_rows(pairs), device)

    @staticmethod
    def of(rows: Ints, device: torch.device) -> CopyTable:
        """A table of rows of :func:`copy_rows`, whose copies begin in their order."""
        from .kernels import COPY_WORDS, copy_segments

        tables = build_tables(rows, _COPY_TILE)
        launches = [
            Launch(copy_segments, _COPY_WARPS, t, _constants(t, _COPY_TILE, COPY_WORDS), device, ())
            for t in tables
        ]
        return CopyTable(launches, sum(t.nbytes for t in tables))


class CastTable(Launches):
    """Casts between strided memory of two floating-point types; as :class:`CopyTable` otherwise."""

    @staticmethod
    def build(
        pairs: Iterable[tuple[Strided, Strided]],
        source: torch.dtype,
        target: torch.dtype,
        device: torch.device,
    ) -> CastTable:
        """A table of (source, destination) pairs.

        Args:
            pairs: memory of the two types.
            source: type of all sources.
            target: type of all destinations.
            device: that reads and writes them.

        Raises:
            ValueError: a source and a destination of different shapes, memory that is not aligned to its elements, or
                a destination that has several elements at one place.
        """
        from .kernels import FLOATS, cast_segments

        # The tables count in elements, as if each were one byte on both sides.
        rows = collapse((_in_elements(a), _in_elements(_writable(b)), 0) for a, b in pairs)
        tables = build_tables(rows, _CAST_TILE)
        types = (FLOATS[source], source.itemsize, FLOATS[target], target.itemsize)
        launches = [
            Launch(cast_segments, _COPY_WARPS, t, (COLUMNS, *types, t.unit, _CAST_TILE, t.nested), device, ())
            for t in tables
        ]
        return CastTable(launches, sum(t.nbytes for t in tables) * target.itemsize)


class ChecksumTable:
    """Checksums of strided memory, as :func:`.checksum.checksum` defines them for the packed bytes."""

    def __init__(self, launches: Sequence[Launch], nbytes: int):
        self._launches = launches
        self.nbytes = nbytes

    @staticmethod
    def build(
        views: Sequence[tuple[Strided, int | Strided]],
        device: torch.device,
        slots: Sequence[int] | None = None,
    ) -> ChecksumTable:
        """A table of views, each with its place in its message.

        Args:
            views: live memory, which lies row-major in the message from a byte offset on, or else where the message's
                bytes at "addresses" from 0 on are.
            device: that holds the memory.
            slots: for each view the row of ``out`` that its message adds up in; all 0 if left out.
        """
        from .kernels import CHECKSUM_WORDS, checksum_segments

        triples = (
            (
                view,
                place if isinstance(place, Strided) else Strided.packed(place, view.shape, view.itemsize),
                slot,
            )
            for (view, place), slot in zip(views, slots or [0] * len(views), strict=True)
        )
        tables = build_tables(collapse(triples), _CHECKSUM_TILE)
        like = torch.empty(2, dtype=torch.int64, device=device)
        launches = [
            Launch(
                checksum_segments,
                _CHECKSUM_WARPS,
                t,
                _constants(t, _CHECKSUM_TILE, CHECKSUM_WORDS),
                device,
                (like,),
            )
            for t in tables
        ]
        return ChecksumTable(launches, sum(t.nbytes for t in tables))

    def compute(self, out: torch.Tensor) -> None:
        """Set ``out`` (int64, ``[2]`` or ``[slots, 2]``) to the checksums."""
        out.zero_()
        self.add_to(out)

    def add_to(self, out: torch.Tensor) -> None:
        """Add the checksums to ``out``, whose rows of this table have to be zero before."""
        for launch in self._launches:
            launch(out)


class MagnitudeTable:
    """The largest magnitude of each of many views; as :class:`CopyTable` otherwise."""

    def __init__(self, launches: Sequence[Launch], views: int, device: torch.device):
        self._launches = launches
        self._views = views
        self._device = device

    @staticmethod
    def build(
        views: Sequence[torch.Tensor], device: torch.device, programs: int | None = _MAGNITUDE_PROGRAMS
    ) -> MagnitudeTable:
        """A table of views, any strides.

        Args:
            views: FP32, BF16, FP16 or ``uint8``.
            device: of them.
            programs: at most so many, that leave room to other kernels; None for as many as there are tiles.

        Raises:
            ValueError: memory that is not aligned to its elements.
        """
        from .kernels import NUMBERS, largest_magnitudes

        by_dtype: dict[torch.dtype, list[tuple[Strided, Strided, int]]] = {}
        for slot, view in enumerate(views):
            memory = _in_elements(Strided.of(view))
            packed = Strided.packed(0, memory.shape, 1)
            by_dtype.setdefault(view.dtype, []).append((memory, packed, slot))
        like = torch.empty(1, dtype=torch.int32, device=device)
        launches = [
            Launch(
                largest_magnitudes,
                _MAGNITUDE_WARPS,
                t,
                (COLUMNS, NUMBERS[dtype], dtype.itemsize, t.unit, _MAGNITUDE_TILE, t.nested, len(t.tiles)),
                device,
                (like,),
                programs,
            )
            for dtype, triples in by_dtype.items()
            for t in build_tables(collapse(triples), _MAGNITUDE_TILE)
        ]
        return MagnitudeTable(launches, len(views), device)

    def compute(self) -> torch.Tensor:
        """FP32 ``[views]``, NaN or infinity of a view that holds one; on the current stream."""
        bits = torch.zeros(self._views, dtype=torch.int32, device=self._device)
        for launch in self._launches:
            launch(bits)
        return bits.view(torch.float32)


def copy_rows(pairs: Iterable[tuple[Strided, Strided]], most: int | None = None) -> Ints:
    """Rows for :meth:`CopyTable.of` of (source, destination) pairs, in their order.

    Args:
        pairs: memory of equal shape and item size.
        most: bytes of a row; None for as many as a row can have.

    Raises:
        ValueError: as :meth:`CopyTable.build`.
    """
    triples = ((source, _writable(target), 0) for source, target in pairs)
    return collapse(triples) if most is None else collapse(triples, most)


def _writable(target: Strided) -> Strided:
    if target.repeats:
        raise ValueError(
            f"memory of shape {list(target.shape)} and byte strides {list(target.strides)} can't be copied to: several "
            "elements share one place, and it would keep any of them; hand over a tensor that was not expanded"
        )
    return target


def _in_elements(memory: Strided) -> Strided:
    if any(number % memory.itemsize for number in (memory.address, *memory.strides)):
        raise ValueError(
            f"elements of {memory.itemsize} bytes at {memory.address:#x} with byte strides {memory.strides} are not "
            "aligned, and can't be cast"
        )
    strides = tuple(stride // memory.itemsize for stride in memory.strides)
    return Strided(memory.address // memory.itemsize, memory.shape, strides, 1)


def _constants(table: Table, tile_units: int, words: Mapping[int, tuple[Any, int, int]]) -> tuple[Any, ...]:
    return (COLUMNS, *words[table.unit], tile_units, table.nested)
