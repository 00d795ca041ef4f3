"""Record files of the framework adapters. The folder is checked before anything moves; a failed write fails no refit."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RefitError
from .record import RefitRecord

logger = logging.getLogger(__name__)


def require_records_dir(folder: str | None, key: str) -> None:
    """Make the folder for the records, and see that files can be made in it.

    Args:
        folder: None for no records.
        key: of the setting, for the error.

    Raises:
        RefitError: they can't.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RefitError(
            f"{key}: no record can be written to {folder} on this host: {error}. Nothing has moved; name a folder that "
            "can be written on all hosts, or null for no records",
            stage="settings",
        ) from error


def write_record(folder: str, record: RefitRecord, train_ranks: int) -> None:
    """Append a line to ``refits-<role>-<rank>.jsonl`` of ``folder``, as :func:`append_records`."""
    place = record.rank if record.role == "trainer" else record.rank - train_ranks
    append_records(Path(folder) / f"refits-{record.role}-{place}.jsonl", [record.to_json()])


def append_records(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append a line a record to ``file``; a failure is logged, as the refit has committed by then.

    Args:
        file: made, with its folder, if it is not there.
        records: of one version, one at least, as plain data.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.writelines(json.dumps(record) + "\n" for record in records)
    except OSError:
        logger.exception(
            "the record of version %d was not written to %s; the weights are whole and may be served",
            records[0]["version"],
            file,
        )
