"""Ask a module that builds real models what it found, in a process of its own: they set global state."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

from tests.servers import processes
from tests.spawn import run_alone


def ask(
    module: str,
    cases: list[dict[str, Any]],
    environment: dict[str, str],
    made_by: Callable[[], ForkServerContext] = processes,
) -> list[dict[str, Any]]:
    """What ``tests.catalog.<module>`` answers to ``cases``, one entry each; both pass as JSON."""
    answer = run_alone(_answer, module, json.dumps(cases), environment=environment, made_by=made_by)
    found = json.loads(answer)
    assert isinstance(found, list)
    return found


def _answer(module: str, cases: str) -> str:
    return json.dumps(importlib.import_module(f"tests.catalog.{module}").answers(json.loads(cases)))
