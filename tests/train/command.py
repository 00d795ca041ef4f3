"""The command line as a user runs it, in a process of its own or in the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlrefit.recipes.cli import main
from rlrefit.recipes.run.files import read_json_lines
from tests.warm_python import forks_of, warm_python

# Small enough to be quick, large enough that every part of a step has something to do.
SHORT = (
    "algorithm.prompts_per_step=16",
    "algorithm.minibatches=2",
    "validation.samples=8",
    "ray.timeout_s=200",
)


@contextmanager
def python_of_a_run() -> Iterator[Path]:
    """A Python for the command and its ranks: a warm one, but where they take GPUs, which nothing forked can."""
    if Path("/dev/nvidiactl").exists():
        yield Path(sys.executable)
    else:
        with warm_python() as python:
            yield python


def rlrefit(*arguments: str, cwd: Path, python: Path = Path(sys.executable)) -> subprocess.Popen[str]:
    """Start ``rlrefit`` with the arguments, by this Python or a warm one."""
    return subprocess.Popen(
        [python, "-m", "rlrefit.recipes.cli", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        # The server of the tests' processes, of which one may ask, hides GPUs.
        env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {"COLUMNS": "200"},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 280.0) -> tuple[int, str]:
    """Exit code and output of a command that was started."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"the command ran longer than {timeout_s} s:\n{output}") from None
    return process.returncode, output


def run_here(
    *arguments: str, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and output of the command in the test's own process, which has loaded already what it needs."""
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("COLUMNS", "200")
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out + said.err


def wait_for_step(process: subprocess.Popen[str], step: int, timeout_s: float = 300.0) -> str:
    """Read the command's output up to a step's line; a command that does not get there in time is killed."""
    assert process.stdout is not None
    read = ""
    late = threading.Timer(timeout_s, process.kill)
    late.start()
    try:
        for line in process.stdout:
            read += line
            if line.startswith(f"step {step} "):
                return read
    finally:
        late.cancel()
    process.kill()
    process.wait()
    raise AssertionError(f"step {step} did not come within {timeout_s} s:\n{read}")


def ray_processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes that Ray started for a command; those of other runs on the machine are left out."""
    command = psutil.Process(process.pid)
    found = [command]
    for one in found:  # grows
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += one.children() + forks_of(one)
    own = [command, *forks_of(command)]
    return [child for child in found if child not in own and child.is_running()]


def end_group(process: subprocess.Popen[str]) -> None:
    """SIGTERM to the command's whole process group, as ``timeout`` and supervisors send it."""
    command = psutil.Process(process.pid)
    os.killpg(os.getpgid([command, *forks_of(command)][-1].pid), signal.SIGTERM)


def kill_rank(process: subprocess.Popen[str], actor: str) -> None:
    """Kill one rank's process as the kernel would when memory runs out."""
    for child in ray_processes_of(process):
        with suppress(psutil.NoSuchProcess):
            if (child.cmdline() or [""])[0].startswith(f"ray::{actor}"):
                child.send_signal(signal.SIGKILL)
                return
    raise AssertionError(f"the command has no process of actor {actor}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's ``metrics.jsonl``."""
    return read_json_lines(folder / "metrics.jsonl")


# Seconds, and what `verify: sampled` checks: each epoch begins at a random turn.
_OF_EACH_RUN = {"refit/seconds", "refit/bytes_verified"}


def curve(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of the lines must not depend on when and how often a run was stopped."""

    def counts(key: str) -> bool:
        return "time" not in key and "per_s" not in key and key not in _OF_EACH_RUN

    return [{key: value for key, value in row.items() if counts(key)} for row in rows]


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of a curve must not depend on where the weights travelled."""
    moved = ("refit/", "stage/")
    return [{key: value for key, value in row.items() if not key.startswith(moved)} for row in curve(rows)]
