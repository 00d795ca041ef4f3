"""The servers of the tests' processes."""

from __future__ import annotations

import os

import pytest

from tests.spawn import run_alone


def tell_environment() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")


def test_a_process_has_no_gpus_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_alone(tell_environment, environment={}) == ("", "1")


def ask_for_one_more() -> tuple[int, int]:
    """The parent of this process and of one that it starts itself."""
    return os.getppid(), run_alone(os.getppid, environment={})


def test_all_that_descends_from_a_session_is_forked_by_one_server() -> None:
    first, second = run_alone(ask_for_one_more, environment={})
    assert first == second
