"""Stands where a command wants a Python, and has a process of a server run its command line (``tests/warm_python.py``).

It passes signals on, ends as the process does, and is named after it. The real Python runs all but Ray's workers, the
recipes' command line and the engine of a live benchmark.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import gc
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver, process, reduction, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from tests.garbage import collect_rarely
from tests.servers import Process

_WORKER, _SETUP = "default_worker.py", "setup_worker.py"
_RECIPES = ["-m", "rlrefit.recipes.cli"]
_ENGINE = ["-m", "rlrefit.recipes.bench.live.engine_main"]
# In which workers of one job differ: Ray and verl ask for these when they need them.
_ASKED_FOR = ("RAY_LOCAL_WORLD_SIZE", "RAY_EXPERIMENTAL_NOSET_")
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Launched(Process):
    """Has the launcher's environment, and knows the servers that the one knows which it is forked from."""

    _start_method = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_environment": dict(os.environ)}

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Server(_Launched):
    watches_parent = False


class _Command(_Launched):
    """Has the launcher's files too."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_files": [reduction.DupFd(file) for file in range(3)]}

    def ends_with(self) -> list[int]:
        return [*super().ends_with(), _program[0].fileno()]

    def run(self) -> None:
        for number, file in enumerate(self._files):
            os.dup2(file.detach(), number)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.BufferedWriter(io.FileIO(file, "w", closefd=False)), line_buffering=True)
            for file in (1, 2)
        )
        os.setpgrp()  # Ray ends the group of a worker that has ended
        super().run()


class _Engine(_Command):
    """Has the socket too whose number in the launcher is its last argument."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_socket": reduction.DupFd(int(self._args[1][-1]))}

    def run(self) -> None:
        program, arguments = self._args
        self._args = program, [*arguments[:-1], str(self._socket.detach())]
        super().run()


# In the servers of a program and what they fork: what ends with it, and modules for Ray's workers.
_program: tuple[Connection, Sequence[str]]


def serve(listener: socket.socket, goes_on: Connection, loaded: Sequence[str]) -> None:
    """Fork processes for the launchers until the program's end, and wait for theirs."""
    global _program
    _program = goes_on, loaded
    _fork(listener)


def _serve_workers(listener: socket.socket) -> None:
    gc.disable()
    for name in _program[1]:
        import_module(name)
    collect_rarely()
    _fork(listener)


def _fork(listener: socket.socket) -> None:
    # The module's own stays that of the session.
    own = forkserver._forkserver = forkserver.ForkServer()
    forkserver.get_inherited_fds = own.get_inherited_fds
    try:
        forkserver.main(listener.detach(), os.dup(_program[0].fileno()), [])
    finally:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def launch() -> None:
    """Run this process's command line."""
    program, arguments = os.path.abspath(sys.argv[0]), sys.argv[1:]
    arguments = _set_up(program, arguments) or arguments
    is_worker = os.path.basename((arguments or [""])[0]) == _WORKER
    if not is_worker and arguments[:2] not in (_RECIPES, _ENGINE):
        _run_for_real(program, arguments)
    nothing = os.open(os.devnull, os.O_RDWR)
    forkserver._forkserver._forkserver_alive_fd = nothing
    resource_tracker.getfd = lambda: nothing
    del sys.modules["__main__"].__file__  # it is not the command's
    folder = os.path.dirname(os.environ.get("WARM_PYTHON") or program)
    address = os.path.join(folder, "socket")
    if is_worker:
        address = _server_of_workers(folder, address)
    kind = _Engine if arguments[:2] == _ENGINE else _Command
    command = _started(kind(target=_run, args=(program, arguments)), address)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(command.pid, number))
    with open("/proc/self/comm", "w") as name:
        name.write(f"for {command.pid}")
    command.join()
    code = command.exitcode
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # and wait for no server


def _set_up(program: str, arguments: list[str]) -> list[str] | None:
    """What Ray's script ``setup_worker.py`` does for a worker that this program runs, and the worker's arguments.

    The script loads Ray for most of a second, for each worker with variables of its own, to read them and to start the worker.
    What it would do more than that is left to it, and None is returned.
    """
    if not arguments or os.path.basename(arguments[0]) != _SETUP:
        return None
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    asked, rest = parser.parse_known_args(arguments[1:])
    context = json.loads(asked.serialized_runtime_env_context)
    variables, python = context.pop("env_vars", None), context.pop("py_executable", None)
    # Ray's agent, which is run by the real Python, names that one where no other is asked for.
    by_this = python in (None, sys.executable) or shlex.split(python) == [program]
    if asked.language != "PYTHON" or any(context.values()) or not by_this:
        return None
    for name, value in (variables or {}).items():
        # As ray._private.utils.update_envs: what is not set is empty.
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    return rest


def _server_of_workers(folder: str, address: str) -> str:
    """Ray reads as it loads of which cluster a worker is, and of which job: each has a server that has loaded it so."""
    read = sorted(
        pair
        for pair in os.environ.items()
        if pair[0].startswith("RAY_") and not pair[0].startswith(_ASKED_FOR)
    )
    own = os.path.join(folder, hashlib.sha1(repr(read).encode()).hexdigest()[:16])
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(own):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(own)
                listener.listen(64)
                _started(_Server(target=_serve_workers, args=(listener,)), address)
    return own


def _started(process: Process, address: str) -> Any:
    forkserver._forkserver._forkserver_address = address
    process.start()
    return process


def _run_for_real(program: str, arguments: list[str]) -> None:
    if arguments and os.path.basename(arguments[0]) == _SETUP:
        # It starts the worker by the Python that Ray's agent, which is a real one, has told.
        real, own = (f'"{path}"' for path in (sys.executable, program))
        arguments = [argument.replace(real, own) for argument in arguments]
    os.execv(sys.executable, [sys.executable, *arguments])


def _draw_own_numbers() -> None:
    """Ray's generator of identifiers is forked with all else.

    Two workers that begin at once would make an object of one name in the store to try it, and one of them would abort.
    """
    from ray._raylet import ObjectID

    for _ in range(int.from_bytes(os.urandom(2))):
        ObjectID.from_random()


def _run(program: str, arguments: list[str]) -> None:
    """Run the command line as an interpreter does."""
    sys.executable = program
    if "ray" in sys.modules:
        _draw_own_numbers()
    # Of nobody's multiprocessing any more.
    process.current_process().name = "MainProcess"
    process._parent_process = None  # type: ignore[attr-defined]
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [os.getcwd() if is_module else os.path.dirname(arguments[0]), *searched]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
