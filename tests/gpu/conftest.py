"""What tests on GPUs share.

What is found there is told at once: a session that is killed loses no traceback of a test that failed before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from .vllm_trainer import Main, Trainer, trainer_main


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


@pytest.fixture(scope="module")
def what_trainer_runs() -> Main:
    """A module may have its own."""
    return trainer_main


@pytest.fixture(scope="module")
def trainer(what_trainer_runs: Main) -> Iterator[Trainer]:
    """A process on the last GPU that sends weights to the engines of a module."""
    found = Trainer(what_trainer_runs)
    yield found
    found.close()
