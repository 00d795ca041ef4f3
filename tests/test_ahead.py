"""Work that is begun before the tests that ask for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.ahead import FoundAhead, Work, WorkFailed, keeping_time, of_all_tests


def tell_folder(folder: Path) -> Path:
    return folder


def fail(folder: Path) -> None:
    raise KeyError("what is missing")


def tell_niceness(folder: Path) -> int:
    return os.nice(0)


@keeping_time
def tell_niceness_in_time(folder: Path) -> int:
    return os.nice(0)


@of_all_tests
def tell_pid(folder: Path) -> int:
    return os.getpid()


def start_and_wait(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    (folder / "unfinished").write_text(str(child.pid))
    (folder / "unfinished").rename(folder / "pid")
    child.wait()


def wait_for_the_last(folder: Path) -> str:
    deadline = time.monotonic() + 60
    while not (last := folder.with_name(f"{__name__}.tell_folder")).exists():
        assert time.monotonic() < deadline, "nobody began the work after this one"
        time.sleep(0.05)
    return last.name


def die(folder: Path) -> None:
    os._exit(3)


def wait_in_c(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    (folder / "pid").write_text(str(child.pid))
    child.wait()


def module_with(*works: Work) -> ModuleType:
    module = ModuleType("module")
    module.AHEAD = works  # type: ignore[attr-defined]
    return module


def test_what_works_return_raise_and_die_of_comes_to_who_asks_in_any_order(tmp_path: Path) -> None:
    modules = [
        module_with(tell_folder, die),
        ModuleType("other"),
        module_with(fail, tell_folder, tell_niceness),
    ]
    found = FoundAhead(dict.fromkeys(modules, False), tmp_path)
    with pytest.raises(WorkFailed, match="KeyError: 'what is missing'"):
        found.by(fail)
    assert found.by(tell_folder).parent == tmp_path
    assert found.by(tell_folder).is_dir()
    with pytest.raises(BrokenProcessPool):
        found.by(die)
    assert found.by(tell_niceness) > os.nice(0)  # the others are done in another process
    found.close()


def test_what_is_not_begun_when_a_test_waits_is_begun_beside_and_no_nicer_where_it_keeps_time(
    tmp_path: Path,
) -> None:
    found = FoundAhead({module_with(wait_for_the_last, tell_niceness_in_time, tell_folder): False}, tmp_path)
    assert found.by(wait_for_the_last).endswith("tell_folder")
    assert found.by(tell_niceness_in_time) == os.nice(0)
    found.close()


@pytest.mark.parametrize("full", [False, True])
def test_work_of_full_tests_is_done_where_there_are_some(full: bool, tmp_path: Path) -> None:
    found = FoundAhead({module_with(tell_folder, tell_pid): full}, tmp_path)
    assert found.by(tell_folder).is_dir()
    if full:
        assert found.by(tell_pid) != os.getpid()
    else:
        with pytest.raises(AssertionError, match="tell_pid"):
            found.by(tell_pid)
    found.close()


def test_work_that_takes_too_long_tells_where_it_is_and_ends_with_what_it_started(tmp_path: Path) -> None:
    found = FoundAhead({module_with(wait_in_c, tell_folder): False}, tmp_path, longest_s=5.0)
    with pytest.raises(WorkFailed, match=r"(?s)wait_in_c took longer than it may:.* in wait_in_c"):
        found.by(wait_in_c)
    [file] = tmp_path.glob("*wait_in_c/pid")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(file.read_text())).wait(10)
    assert found.by(tell_folder).is_dir()
    found.close()


def test_work_that_nobody_asked_for_ends_with_the_session_and_its_processes_with_it(tmp_path: Path) -> None:
    found = FoundAhead({module_with(start_and_wait): False}, tmp_path)
    while not (files := list(tmp_path.glob("*/pid"))):
        time.sleep(0.05)
    child = psutil.Process(int(files[0].read_text()))
    found.close()
    child.wait(10)
    with pytest.raises(BrokenProcessPool):
        found.by(start_and_wait)
