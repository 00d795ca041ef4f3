"""The servers of the tests' processes, and the environment of the session that they start from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.servers import _Server, processes
from tests.spawn import run_alone


@pytest.fixture(autouse=True)
def of_a_session_with_gpus() -> Iterator[None]:
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0", OMP_NUM_THREADS="7"):
        yield


def test_threads_that_ask_for_processes_leave_the_environment_alone() -> None:
    processes()
    environment = dict(os.environ)
    seen = set()

    def ask() -> None:
        for _ in range(1500):
            processes()
            seen.add(os.environ["CUDA_VISIBLE_DEVICES"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"0"}
    assert dict(os.environ) == environment


def test_a_server_starts_without_gpus_and_the_session_keeps_its_environment() -> None:
    environment = dict(os.environ)
    server = _Server()
    server.ensure_running()
    try:
        first = server._forkserver_pid
        while not (environ := Path(f"/proc/{first}/environ").read_bytes()):
            time.sleep(0.01)  # it is only being started
        pairs = environ.split(b"\0")
        assert {b"CUDA_VISIBLE_DEVICES=", b"OMP_NUM_THREADS=1"} <= set(pairs)
        assert dict(os.environ) == environment
        server.ensure_running()
        assert server._forkserver_pid == first
    finally:
        server._stop()


def test_a_server_that_was_killed_is_started_anew() -> None:
    environment = dict(os.environ)
    server = _Server()
    server.ensure_running()
    first = server._forkserver_pid
    os.kill(first, 9)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    server.ensure_running()
    try:
        assert server._forkserver_pid not in (None, first)
        assert dict(os.environ) == environment
    finally:
        server._stop()


def tell_environment() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")


def test_a_process_has_no_gpus_and_one_thread() -> None:
    assert run_alone(tell_environment, environment={}) == ("", "1")
