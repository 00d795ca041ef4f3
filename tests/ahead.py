"""Long work of many processes, begun before the tests that ask for it: it takes the time that other tests leave idle.

A module names such work in ``AHEAD``, and gets what it returned from the fixture ``found_ahead``. A process of its own
does it, so that nothing of it meets the tests of the moment: neither random states nor environment nor files.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Found = TypeVar("Found")
Work = Callable[[Path], Found]

# The tests of the moment come first, but not so far that this would stand still on a busy machine.
_NICENESS = 5


def keeping_time[W: Callable[..., Any]](work: W) -> W:
    """Mark a work as one that is no nicer than the tests: something in it gives up when it gets too little time."""
    work.keeps_time = True  # type: ignore[attr-defined]
    return work


class WorkFailed(AssertionError):
    """A work raised; the text holds its traceback."""


class FoundAhead:
    """What works found, each in a folder of its own.

    A process does them one after another, in the order of the modules. Once a test has to wait for one, so that nothing
    else happens in the session, a second process takes those that have not been begun, the last ones first.
    """

    def __init__(self, modules: Iterable[ModuleType], root: Path):
        self._works = list(dict.fromkeys(work for module in modules for work in getattr(module, "AHEAD", ())))
        self._root = root
        self._found: dict[str, tuple[bool, Any]] = {}
        self._starting: list[Future[_Doer]] = []
        self._ended: list[_Doer] = []
        if self._works:
            self._start(self._works)

    def by(self, work: Work[Found]) -> Found:
        """What a work returned; waits for it.

        Raises:
            WorkFailed: it raised, or its process died.
        """
        while _name(work) not in self._found:
            assert work in self._works, f"no module that was collected has {_name(work)} in AHEAD"
            if len(self._starting) == 1 and not all(_folder_of(w, self._root).exists() for w in self._works):
                self._start(self._works[::-1])
            self._receive()
        succeeded, value = self._found[_name(work)]
        if not succeeded:
            raise WorkFailed(value)
        found: Found = value
        return found

    def close(self) -> None:
        """End what nobody asked for any more, with all processes that it started."""
        for doer in self._doers():
            process = doer.process
            if process.is_alive():
                leads_group = os.getpgid(process.pid) == process.pid
                (os.killpg if leads_group else os.kill)(process.pid, signal.SIGKILL)
            process.join()

    def _start(self, works: Sequence[Work[Any]]) -> None:
        # Not here: its server has to load first.
        pool = ThreadPoolExecutor(1)
        self._starting.append(pool.submit(_start, works, self._root))
        pool.shutdown(wait=False)

    def _doers(self) -> list[_Doer]:
        return [starting.result() for starting in self._starting]

    def _receive(self) -> None:
        """Wait for the next answer, or a process's end."""
        doers = {doer.pipe: doer for doer in self._doers() if doer not in self._ended}
        if not doers:
            codes = ", ".join(str(code) for doer in self._ended if (code := doer.process.exitcode))
            raise WorkFailed(f"its process died with exit code {codes}")
        for pipe in wait(list(doers)):
            assert isinstance(pipe, Connection)
            try:
                name = pipe.recv()
            except EOFError:
                doers[pipe].process.join()
                self._ended.append(doers[pipe])
                continue
            self._found[name] = pickle.loads(_answer_of(name, self._root).read_bytes())


@dataclass(frozen=True)
class _Doer:
    """A process that does works, and tells their names as they are done."""

    pipe: Connection
    process: Any


def _start(works: Sequence[Work[Any]], root: Path) -> _Doer:
    from tests.servers import processes  # which only sessions with tests that want them shall start

    ours, theirs = processes().Pipe(duplex=False)
    # Not a daemon: it has children.
    process = processes().Process(target=_do_all, args=(works, root, theirs))
    process.start()
    theirs.close()
    return _Doer(ours, process)


def _folder_of(work: Work[Any], root: Path) -> Path:
    return root / _name(work)


def _answer_of(name: str, root: Path) -> Path:
    return root / f"{name}.pickle"


def _name(work: Work[Any]) -> str:
    return f"{work.__module__}.{work.__qualname__}"


def _do_all(works: Sequence[Work[Any]], root: Path, pipe: Connection) -> None:
    os.setsid()
    in_time = ThreadPoolExecutor(1)
    in_time.submit(
        os.getpid
    ).result()  # a thread, and what it starts, is as nice as this one was when it began
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    for work in works:
        folder = _folder_of(work, root)
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # the other process has begun it
        try:
            keeps_time = getattr(work, "keeps_time", False)
            answer = True, in_time.submit(work, folder).result() if keeps_time else work(folder)
        except BaseException:
            answer = False, traceback.format_exc()
        # In a file: a pipe would be full until a test asks, and the works that follow would wait for that.
        _answer_of(_name(work), root).write_bytes(pickle.dumps(answer))
        pipe.send(_name(work))


def _end_with_the_session() -> None:
    session = parent_process()
    assert session is not None
    wait([session.sentinel])
    os.killpg(0, signal.SIGKILL)
