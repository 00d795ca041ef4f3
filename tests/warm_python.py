"""A Python for command lines that others run, such as Ray's for its workers: in place of each, a warm process is forked.

``tests/servers.py`` does so for processes that the tests start themselves.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil

from tests.servers import processes
from tests.warm_launcher import LENGTH_BYTES, WORKER, send

_LAUNCHER = Path(__file__).with_name("warm_launcher.py")
# Of any worker of Ray's, with what it loads to pass objects on.
OF_WORKERS = (
    "ray._private.node",
    "ray.actor",
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "pyarrow",
    "starlette.datastructures",
)
# Of those that are the recipes' ranks, and of those that are vLLM's engines.
RANKS = (
    *OF_WORKERS,
    "torch.distributed.checkpoint._fsspec_filesystem",
    "rlrefit.recipes.policy.group",
    "rlrefit.recipes.rollout.transformers",
    "rlrefit.workers.engines.transformers.engine",
)
ENGINE = (*OF_WORKERS, "rlrefit.recipes.rollout.vllm", "rlrefit.workers.engines.vllm.driver")


@contextmanager
def warm_python(
    made_by: Callable[[], ForkServerContext] = processes, loaded: Sequence[str] = RANKS
) -> Iterator[Path]:
    """Path of a program that runs the command line of the recipes, and Ray's workers, as Python would.

    The processes have no GPUs, and end with the block at the latest. Their environment is that of the command; libraries but
    Ray have read the server's as they were loaded. A worker whose variable ``WARM_PYTHON`` is the path of the ``socket``
    beside another such program, is that one's.

    Args:
        made_by: of :mod:`tests.servers`, what forks the process that the others are forked from.
        loaded: modules for the workers beside those of its server.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm_python_"))  # short: a socket's path has little room
    launcher = folder / "python"
    launcher.write_text(f"#!{sys.executable} -IS\n{_LAUNCHER.read_text()}")
    launcher.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        context = made_by()
        theirs, ours = context.Pipe(duplex=False)
        server = context.Process(target=_serve, args=(listener, theirs, launcher, loaded))
        server.watches_parent = False  # type: ignore[attr-defined]  # but the pipe's end
        server.start()
    theirs.close()
    try:
        yield launcher
    finally:
        ours.close()
        server.join()
        shutil.rmtree(folder)


def forks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The process that runs in a launcher's place, if it is one."""
    label, _, pid = launcher.name().partition(" ")
    return [psutil.Process(int(pid))] if label == "for" and psutil.pid_exists(int(pid)) else []


@dataclass(frozen=True)
class _Asked:
    """What a launcher asks for.

    Attributes:
        files: its standard ones, and its connection to the server.
    """

    files: tuple[int, ...]
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    niceness: int

    def send_to(self, server: socket.socket) -> None:
        send(server, {name: value for name, value in vars(self).items() if name != "files"}, self.files)


def _received(connection: socket.socket, files: int) -> _Asked | None:
    """None where the other end has been closed, or its process was killed."""
    message, received, _, _ = socket.recv_fds(connection, LENGTH_BYTES, files)
    length = int.from_bytes(message, "little")
    text = connection.recv(length, socket.MSG_WAITALL)
    if text and len(text) == length:
        return _Asked(tuple(received), **json.loads(text))
    _close(received)
    return None


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


class _Forks:
    """Processes in the places of launchers, which are told their pids and later how they ended."""

    def __init__(self, launcher: Path) -> None:
        self._launcher = launcher
        self._waiting = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, int]] = {}

    def listen(self, source: Any, act: Callable[[], bool]) -> None:
        """Act when the source has something to read; :meth:`run` goes on while that returns true."""
        self._waiting.register(source, selectors.EVENT_READ, act)

    def run(self) -> None:
        try:
            while all(key.data() for key, _ in self._waiting.select()):
                pass
        finally:
            for pid in list(self._running):
                self._kill(pid)

    def leave(self) -> None:
        """Close all that the process has of this, where it was forked from another one."""
        _close(key.fd for key in list(self._waiting.get_map().values()))
        self._waiting.close()

    def add(self, asked: _Asked) -> None:
        """Fork the process that was asked for."""
        *standard, launcher = asked.files
        if not (pid := os.fork()):
            self.leave()
            os.close(launcher)
            _become(asked, str(self._launcher))
        _close(standard)
        end = os.pidfd_open(pid)
        self._running[pid] = launcher, end
        self.listen(end, lambda: self._tell_end(pid))
        self.listen(launcher, lambda: self._kill(pid))  # it says nothing more, but ends
        _tell(launcher, pid)

    def _kill(self, pid: int) -> bool:
        if pid in self._running:
            os.kill(pid, signal.SIGKILL)
        return self._tell_end(pid)

    def _tell_end(self, pid: int) -> bool:
        if pid in self._running:
            files = self._running.pop(pid)
            _, status = os.waitpid(pid, 0)
            _tell(files[0], os.waitstatus_to_exitcode(status))
            for file in files:
                self._waiting.unregister(file)
            _close(files)
        return True


def _tell(launcher: int, number: int) -> None:
    try:
        os.write(launcher, number.to_bytes(LENGTH_BYTES, "little", signed=True))
    except ConnectionError:
        return  # it was killed, which its end is to tell


class _Server(_Forks):
    """Forks for all launchers; Ray's workers, from a process that has loaded Ray in their environment.

    Ray reads then of which cluster a worker is, and of which job.
    """

    def __init__(
        self, listener: socket.socket, pipe: Connection, launcher: Path, loaded: Sequence[str]
    ) -> None:
        super().__init__(launcher)
        self._listener = listener
        self._loaded = loaded
        self._of_workers: dict[frozenset[tuple[str, str]], tuple[int, socket.socket]] = {}
        self.listen(listener, self._accept)
        self.listen(pipe, lambda: False)

    def run(self) -> None:
        try:
            super().run()
        finally:
            for pid, connection in self._of_workers.values():
                connection.close()
                os.waitpid(pid, 0)

    def _accept(self) -> bool:
        launcher, _ = self._listener.accept()
        asked = _received(launcher, 3)
        if asked is None:
            launcher.close()
            return True
        asked = replace(asked, files=(*asked.files, launcher.detach()))
        if os.path.basename(asked.arguments[0]) == WORKER:
            asked.send_to(self._for_workers(asked))
            _close(asked.files)
        else:
            self.add(asked)
        return True

    def _for_workers(self, asked: _Asked) -> socket.socket:
        read = frozenset(pair for pair in asked.environment.items() if pair[0].startswith("RAY_"))
        if read not in self._of_workers:
            ours, theirs = socket.socketpair()
            if not (pid := os.fork()):
                self.leave()
                ours.close()
                _close(asked.files)
                _leave(lambda: self._serve_workers(theirs, asked.environment))
            theirs.close()
            self.listen(ours, _tell_of_death)
            self._of_workers[read] = pid, ours
        return self._of_workers[read][1]

    def _serve_workers(self, source: socket.socket, environment: dict[str, str]) -> None:
        os.environ.clear()
        os.environ.update(environment)
        for name in self._loaded:
            import_module(name)
        forks = _Forks(self._launcher)

        def receive() -> bool:
            if (asked := _received(source, 4)) is None:
                return False
            forks.add(asked)
            return True

        forks.listen(source, receive)
        forks.run()


def _tell_of_death() -> bool:
    raise RuntimeError("the process that Ray's workers are forked from died; what it met stands above")


def _serve(listener: socket.socket, pipe: Connection, launcher: Path, loaded: Sequence[str]) -> None:
    _Server(listener, pipe, launcher, loaded).run()


def _become(asked: _Asked, executable: str) -> None:
    """Run what the launcher was asked to, with all that it has, and leave as an interpreter does."""

    def run() -> None:
        _take_over(asked, executable)
        _run(asked.arguments)

    _leave(run)


def _leave(work: Callable[[], None]) -> None:
    """Do the last work of this process, and end it as an interpreter does."""
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as left:
        code = left.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_over(asked: _Asked, executable: str) -> None:
    for number, file in enumerate(asked.files[:3]):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(file, "w", closefd=False)), line_buffering=True)
        for file in (1, 2)
    )
    os.setpgrp()  # Ray ends the group of a worker that has ended
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.nice(asked.niceness - os.nice(0))
    sys.executable = executable
    # Of nobody's multiprocessing any more.
    process.current_process().name = "MainProcess"
    process._parent_process = None  # type: ignore[attr-defined]
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _run(arguments: list[str]) -> None:
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [os.getcwd() if is_module else os.path.dirname(arguments[0]), *searched]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
