"""What has been written, made to outlast a crash of the host, and told by its hash."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Buffer
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a folder, which fsync of a file doesn't."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Written:
    """What a file holds, as whoever wrote it knows.

    Attributes:
        size: in bytes.
        sha256: hexadecimal digits.
    """

    size: int
    sha256: str


class HashedFile(io.BufferedIOBase):
    """A new file that is hashed as it is written, from its beginning to its end; durable once it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._digest = hashlib.sha256()
        self._failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._failed = OSError(error.errno, error.strerror, str(self._path))
            raise

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            self._size = self.tell()
            os.fsync(self.fileno())
            self._file.close()
        super().close()

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            if self._failed is not None:
                raise self._failed  # torch.save makes an error about positions of it

    @property
    def written(self) -> Written:
        """Of the closed file."""
        return Written(self._size, self._digest.hexdigest())
