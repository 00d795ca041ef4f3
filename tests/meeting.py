"""Files by which the two worlds of a test hear of each other: they share nothing else but the refit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlrefit.recipes.run_files import write_whole


def tell_meeting(folder: Path, rendezvous: dict[str, Any]) -> None:
    """Trainer rank 0: leave word of where to meet."""
    write_whole(folder / "meeting.json", json.dumps(rendezvous))


def meeting_in(folder: Path) -> dict[str, Any]:
    """Where to meet; waits for word of it."""
    path = folder / "meeting.json"
    wait_for(path)
    rendezvous: dict[str, Any] = json.loads(path.read_text())
    return rendezvous


def wait_for(path: Path) -> None:
    """Wait until another process has written ``path``."""
    deadline = time.monotonic() + 150
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody wrote {path}"
        time.sleep(0.02)
