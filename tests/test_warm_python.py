"""A Python for the command lines of others, in whose place warm processes are forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.warm_python import forks_of, warm_python

TOLD = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.environ["ROLE"], os.getcwd(), sys.argv[1:], os.nice(0), sys.path[1], sys.executable, flush=True)
if sys.argv[1:] == ["wait"]:
    threading.Event().wait()
if sys.argv[1:] == ["fail"]:
    raise KeyError("what is missing")
"""


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with warm_python(loaded=("ray",)) as python:
        yield python


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A script of the name that Ray's workers run."""
    script = tmp_path / "default_worker.py"
    script.write_text(TOLD)
    return script


def start(python: Path, worker: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, worker, *arguments],
        cwd=worker.parent,
        env={**os.environ, "ROLE": "worker", "PYTHONPATH": "/first:/second", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(2),
    )


def test_a_worker_runs_with_all_that_its_command_has_and_tells_what_it_raises(
    python: Path, worker: Path
) -> None:
    for arguments, code in ((["one", "two"], 0), (["fail"], 1)):
        process = start(python, worker, *arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert out == f"worker {worker.parent} {arguments} {os.nice(0) + 2} /first {python}\n"
        assert ("KeyError: 'what is missing'" in err) is bool(code)


def test_a_worker_gets_the_variables_that_ray_sets_for_it_and_ray_is_not_loaded_for_that(
    python: Path, worker: Path
) -> None:
    setup = worker.with_name("setup_worker.py")
    setup.write_text("raise SystemExit(9)")  # in Ray's place
    variables = {"ROLE": "of ${WHO}${NOBODY_AT_ALL}"}
    for executable, prefix, code in (
        (str(python), [], 0),
        (sys.executable, [], 0),
        ("/another/python", [], 9),
        (str(python), ["true;"], 9),
    ):
        context = {
            "command_prefix": prefix,
            "env_vars": variables,
            "py_executable": executable,
            "java_jars": [],
        }
        asked = ("--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}")
        process = start(python, setup, str(worker), "one", *asked, WHO="them")
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert out.startswith(f"of them {worker.parent} ['one'] ") is not bool(code)


def test_what_ray_reads_as_it_is_loaded_is_read_for_each_cluster_and_job(python: Path, worker: Path) -> None:
    worker.write_text("from ray._raylet import Config; print(Config.kill_worker_timeout_milliseconds())")
    for milliseconds in ("111", "222", "111"):
        process = start(python, worker, RAY_kill_worker_timeout_milliseconds=milliseconds)
        assert process.communicate(timeout=60)[0] == f"{milliseconds}\n"


def test_workers_of_one_job_have_one_server_whatever_their_frameworks_tell_each(
    python: Path, worker: Path
) -> None:
    worker.write_text("import os; print(os.getppid(), os.environ['RAY_LOCAL_WORLD_SIZE'])")
    told = [start(python, worker, RAY_LOCAL_WORLD_SIZE=size).communicate(timeout=60)[0] for size in "12"]
    (first, one), (second, two) = (line.split() for line in told)
    assert (first == second, one, two) == (True, "1", "2")


def test_a_worker_gets_signals_and_ends_with_its_command_and_with_the_program(worker: Path) -> None:
    with warm_python(loaded=("ray",)) as python:
        killed, ended, left = (start(python, worker, "wait") for _ in range(3))
        of_killed, of_ended, of_left = map(fork_of, (killed, ended, left))
        killed.kill()
        ended.send_signal(signal.SIGTERM)
        assert ended.wait(20) == 7
        assert not of_ended.is_running()
        of_killed.wait(20)
        assert of_left.is_running()
    assert not of_left.is_running()
    for process in (killed, ended, left):
        process.communicate(timeout=60)
        assert process.returncode != 0
    assert not python.exists()


def fork_of(process: subprocess.Popen[str]) -> psutil.Process:
    """When it waits."""
    assert process.stdout is not None
    assert process.stdout.readline().startswith("worker")
    deadline = time.monotonic() + 20
    while not (forks := forks_of(psutil.Process(process.pid))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return forks[0]
