"""Segment tables on a CUDA device, and their launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .segments import COLUMNS, build_tables
from .strided import Strided

# Units that one program moves, and its warps: the fastest on an H100 of those tried (16 KiB and 8 KiB in the
# widest unit; 98% and 92-96% of the device's copy rate for whole weights and for columns of 384 bytes).
_COPY_TILE, _COPY_WARPS = 1024, 8
_CHECKSUM_TILE, _CHECKSUM_WARPS = 512, 4


class _Launch(NamedTuple):
    """One kernel launch: programs, the table on the device, and the constants that choose the variant."""

    programs: int
    tiles: torch.Tensor
    rows: torch.Tensor
    constants: tuple[Any, ...]


class CopyTable:
    """Copies between strided memory, prepared once and launched at every refit.

    Addresses must be reachable from ``device``: its own memory, or a peer's that is mapped.
    """

    def __init__(self, launches: Sequence[_Launch], nbytes: int):
        self._launches = launches
        self.nbytes = nbytes

    @staticmethod
    def build(pairs: Iterable[tuple[Strided, Strided]], device: torch.device) -> CopyTable:
        """A table of (source, destination) pairs.

        Raises:
            ValueError: a source and a destination of different shapes or item sizes.
        """
        from .kernels import COPY_WORDS

        triples = ((source, target, 0) for source, target in pairs)
        return CopyTable(*_upload(triples, device, _COPY_TILE, COPY_WORDS))

    def launch(self) -> None:
        """Enqueue the copies on the current stream: one kernel for each unit width that occurs."""
        from .kernels import copy_segments

        for programs, tiles, rows, constants in self._launches:
            copy_segments[(programs,)](tiles, rows, *constants, num_warps=_COPY_WARPS)


class ChecksumTable:
    """Checksums of strided memory, as :func:`.checksum.checksum` defines them for the packed bytes."""

    def __init__(self, launches: Sequence[_Launch], nbytes: int):
        self._launches = launches
        self.nbytes = nbytes

    @staticmethod
    def build(
        views: Sequence[tuple[Strided, int]], device: torch.device, slots: Sequence[int] | None = None
    ) -> ChecksumTable:
        """A table of views, each with the byte offset of its first element in its message.

        Args:
            views: live memory, which lies row-major in the message from the offset on.
            device: that holds the memory.
            slots: for each view the row of ``out`` that its message adds up in; all 0 if left out.
        """
        from .kernels import CHECKSUM_WORDS

        triples = (
            (view, Strided.packed(offset, view.shape, view.itemsize), slot)
            for (view, offset), slot in zip(views, slots or [0] * len(views), strict=True)
        )
        return ChecksumTable(*_upload(triples, device, _CHECKSUM_TILE, CHECKSUM_WORDS))

    def compute(self, out: torch.Tensor) -> None:
        """Set ``out`` (int64, ``[2]`` or ``[slots, 2]``) to the checksums."""
        out.zero_()
        self.add_to(out)

    def add_to(self, out: torch.Tensor) -> None:
        """Add the checksums to ``out``, whose rows of this table have to be zero before."""
        from .kernels import checksum_segments

        for programs, tiles, rows, constants in self._launches:
            checksum_segments[(programs,)](tiles, rows, out, *constants, num_warps=_CHECKSUM_WARPS)


def _upload(
    pairs: Iterable[tuple[Strided, Strided, int]],
    device: torch.device,
    tile_units: int,
    words: Mapping[int, tuple[Any, int, int]],
) -> tuple[list[_Launch], int]:
    tables = build_tables(pairs, tile_units)
    launches = [
        _Launch(
            len(table.tiles),
            torch.from_numpy(table.tiles).to(device),
            torch.from_numpy(table.rows).to(device),
            (COLUMNS, *words[table.unit], tile_units, table.nested),
        )
        for table in tables
    ]
    return launches, sum(table.nbytes for table in tables)
