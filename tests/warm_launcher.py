"""Stands where a command wants a Python, and has a fork of a warm process run in its place (``tests/warm_python.py``).

It passes signals on, ends as the fork does, and is named after it. The real Python runs all but Ray's workers and the
recipes' command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

WORKER = "default_worker.py"
_RECIPES = ["-m", "rlrefit.recipes.cli"]
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LENGTH_BYTES = 8


def send(connection: socket.socket, asked: dict[str, Any], files: Sequence[int]) -> None:
    """A request, with files that go with it."""
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [len(text).to_bytes(LENGTH_BYTES, "little")], files)
    connection.sendall(text)


def _run_for_real(arguments: list[str]) -> None:
    if arguments and os.path.basename(arguments[0]) == "setup_worker.py":
        # It starts the worker by the Python that Ray's agent, which is a real one, has told.
        real, own = (json.dumps(path) for path in (sys.executable, os.path.abspath(sys.argv[0])))
        arguments = [argument.replace(real, own) for argument in arguments]
    os.execv(sys.executable, [sys.executable, *arguments])


def _run_warm(arguments: list[str]) -> int:
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.nice(0),
    }
    own_server = os.path.join(os.path.dirname(sys.argv[0]), "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ.get("WARM_PYTHON") or own_server)
        send(server, asked, (0, 1, 2))
        pid = _answer(server)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        with open("/proc/self/comm", "w") as name:
            name.write(f"for {pid}")
        return _answer(server)


def _answer(server: socket.socket) -> int:
    answer = server.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    if len(answer) < LENGTH_BYTES:
        sys.exit(f"{sys.argv[0]}: the server of warm processes ended before {sys.argv[1:]} did")
    return int.from_bytes(answer, "little", signed=True)


def _main(arguments: list[str]) -> None:
    if os.path.basename((arguments or [""])[0]) != WORKER and arguments[:2] != _RECIPES:
        _run_for_real(arguments)
    code = _run_warm(arguments)
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _main(sys.argv[1:])
