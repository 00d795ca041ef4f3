"""Files by which the two worlds of a test hear of each other: they share nothing else but the refit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlrefit.recipes.run.files import write_whole


def tell_meeting(folder: Path, rendezvous: dict[str, Any], epoch: int = 0) -> None:
    """Trainer rank 0: leave word of where the worlds meet for an epoch; ``folder`` is theirs alone."""
    write_whole(_word(folder, epoch), json.dumps(rendezvous))


def meeting_in(folder: Path, epoch: int = 0, within_s: float = 200.0) -> dict[str, Any]:
    """Where to meet; waits for word of it."""
    path = _word(folder, epoch)
    wait_for(path, within_s)
    rendezvous: dict[str, Any] = json.loads(path.read_text())
    return rendezvous


def wait_for(path: Path, within_s: float = 200.0) -> None:
    """Wait until another process has written ``path``."""
    deadline = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody wrote {path}"
        time.sleep(0.02)


def _word(folder: Path, epoch: int) -> Path:
    return folder / f"epoch{epoch}.json"
