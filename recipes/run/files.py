"""Files of a run: its folder for one run alone, metrics and records as JSON lines, and whole files that appear at once or not at
all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_unwritable: set[Path] = set()
# What file systems answer that know no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class FolderInUse(RuntimeError):
    """Another run writes into the folder; the text says which process."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep a run's folder to this process. The lock ends with it, however it ends.

    Two runs would remove each other's unfinished checkpoints and mix their metrics: one that was submitted again, say, while the
    first one goes on behind a broken network.

    Raises:
        FolderInUse: another process has it.
        OSError: the folder takes no file.
    """
    with (folder / ".in_use").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise FolderInUse(
                f"{folder} is in use by another run, {file.read().strip() or 'a process that has not said its name'}; wait for its "
                "end or stop it, or give this run another name. Nothing was started, and nothing there was changed"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "the file system of %s has no locks (%s): see that no second run has this folder",
                folder,
                error,
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that no reader and no crash meets half of it."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def append_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows, each whole on a line of its own.

    A file that can't be written (a full disk) does not end the run. The log says so once, until it can be written again.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows)
    try:
        end = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, end)  # or the next row would follow half of this one
            raise
    except OSError as error:
        if path not in _unwritable:
            _unwritable.add(path)
            logger.error(
                "%s can't be written, so rows are missing there from now on: %s. The run goes on; make room",
                path,
                error,
            )
    else:
        _unwritable.discard(path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a crash has cut off is left out."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}:{number + 1} is not JSON; mend or delete the line") from None
    return rows


def keep_json_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drop the rows that are not wanted from a file, and return the others; makes the file if it is missing."""
    rows = [row for row in read_json_lines(path) if wanted(row)]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class MetricsFile:
    """``metrics.jsonl``: one line a step.

    Args:
        path: the file.
        after_step: steps up to this one are kept, later ones dropped: a run that resumes from an
            earlier checkpoint goes through them again.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self._path = path
        self.rows = keep_json_lines(path, lambda row: row["step"] <= after_step)

    def append(self, row: dict[str, Any]) -> None:
        """Add the line of a step."""
        self.rows.append(row)
        append_json_lines(self._path, [row])
