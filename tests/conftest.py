"""What the whole suite shares."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def server_of_processes() -> None:
    """Starts to load beside the first tests, if any test that was collected starts processes.

    In a fixture and not in a hook: what its processes write is captured only if it starts while pytest captures.
    """
    for name in ("tests.spawn", "spawn"):
        if name in sys.modules:
            sys.modules[name].processes()
