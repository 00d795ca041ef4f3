"""Copies of strided views into messages and out of them, casts and encodings on the way, and checksums."""

from .casting import Cast
from .checksum import ChecksumViews, checksum
from .copies import (
    Checksums,
    Copy,
    CpuCopies,
    JoinedCopies,
    Magnitudes,
    make_checksums,
    make_copy,
    make_magnitudes,
)
from .encoded import EncodedView, Encoder, EncodingsByHost, NotComputable, make_encoders
from .rows import row_bytes
from .strided import Strided, repeats
from .tables import CastTable, ChecksumTable, CopyTable, copy_rows

__all__ = [
    "Cast",
    "CastTable",
    "ChecksumTable",
    "ChecksumViews",
    "Checksums",
    "Copy",
    "CopyTable",
    "CpuCopies",
    "EncodedView",
    "Encoder",
    "EncodingsByHost",
    "JoinedCopies",
    "Magnitudes",
    "NotComputable",
    "Strided",
    "checksum",
    "copy_rows",
    "make_checksums",
    "make_copy",
    "make_encoders",
    "make_magnitudes",
    "repeats",
    "row_bytes",
]
