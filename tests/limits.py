"""Ends a session that stands still, also where Python can't interrupt what it waits for, and tells where all its threads are.

pytest-timeout raises an error in the test. That does not reach a thread which is in C, and after a first error nothing limits the
rest of a test any more. Nor does it limit what is before the tests and after them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest


class Limits:
    """A plugin; each limit is in seconds.

    Args:
        loading_s: of the collection, which imports all modules.
        grace_s: of a test beyond its own limit, by which pytest-timeout has raised.
        ending_s: from the last test to the end of the process.
    """

    def __init__(self, loading_s: float = 600.0, grace_s: float = 60.0, ending_s: float = 180.0) -> None:
        self._grace_s, self._ending_s = grace_s, ending_s
        self._told = os.dup(2)  # pytest captures what is written there
        self._allow(loading_s)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("timeout")
        of_all = item.config.getoption("timeout") or item.config.getini("timeout")
        self._allow(float(marker.args[0] if marker else of_all) + self._grace_s)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """After pytest's own, which takes an error for the end of all limits."""
        self._allow(self._seconds)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._allow(self._ending_s)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        sys.stdout.flush()  # what is in a buffer would be lost

    def _allow(self, seconds: float) -> None:
        self._seconds = seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._told)
