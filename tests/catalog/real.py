"""Ask a module that builds real models what it found, in a process of its own: they set global state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask(
    module: str, cases: list[dict[str, Any]], directory: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """What ``tests.catalog.<module>`` answers to ``cases``, one entry each, by files in ``directory``."""
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.catalog.{module}", str(path)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    found = json.loads(path.with_suffix(".found.json").read_text())
    assert isinstance(found, list)
    return found
