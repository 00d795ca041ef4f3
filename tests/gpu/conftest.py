"""What is found on GPUs is told at once: a session that is killed there loses no traceback of a test that failed before."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name and outcome of each test as it ends, with the traceback of one that failed."""
    if report.skipped or (report.when != "call" and report.passed):
        return
    lines = [f"{report.nodeid} {report.when}: {report.outcome} after {report.duration:.1f} s"]
    if report.failed:
        lines.append(report.longreprtext)
    # Not captured: pytest captures while a phase of a test runs.
    sys.stderr.write("\n" + "\n".join(lines) + "\n")
    sys.stderr.flush()


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write a line of figures past pytest's capture."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()

    return write
