"""Gather strided views into messages and scatter them out, and the checksums of what travels."""

from .checksum import ChecksumViews, checksum
from .factory import Checksums, Copy, PairedViews, make_checksums, make_copy
from .strided import Strided
from .tables import ChecksumTable, CopyTable

__all__ = [
    "ChecksumTable",
    "ChecksumViews",
    "Checksums",
    "Copy",
    "CopyTable",
    "PairedViews",
    "Strided",
    "checksum",
    "make_checksums",
    "make_copy",
]
