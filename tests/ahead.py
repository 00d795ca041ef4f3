"""Long work of many processes, begun before the tests that ask for it: it takes the time that other tests leave idle.

A module names such work in ``AHEAD``, and gets what it returned from the fixture ``found_ahead``. A process of its own
does it, so that it shares neither random state nor environment nor files with the tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Work = Callable[[Path], Any]

# The other tests come first, but not so far that this would stand still on a busy machine.
_NICENESS = 5
# Of a work, from its start. The limits of the ranks in it are shorter, and theirs tell more.
_LONGEST_S = 450.0


def keeping_time[W: Callable[..., Any]](work: W) -> W:
    """Mark a work as one that is no nicer than the tests: something in it gives up when it gets too little time."""
    work.keeps_time = True  # type: ignore[attr-defined]
    return work


def of_all_tests[W: Callable[..., Any]](work: W) -> W:
    """Mark a work that only tests of its module which are marked ``full`` ask for."""
    work.of_all_tests = True  # type: ignore[attr-defined]
    return work


def left_to_all(cases: Iterable[str], those: Container[str]) -> list[Any]:
    """Parameters of a test, which ``make test`` leaves out for ``those`` of the cases."""
    return [pytest.param(case, marks=pytest.mark.full) if case in those else case for case in cases]


def lasting[W: Callable[..., Any]](longest_s: float) -> Callable[[W], W]:
    """Mark a work that only ``make test-all`` does as one that may take so many seconds."""

    def mark(work: W) -> W:
        work.longest_s = longest_s  # type: ignore[attr-defined]
        return work

    return mark


class WorkFailed(AssertionError):
    """A work raised, or did not end in time; the text holds its traceback, or those of all its threads."""


class FoundAhead:
    """What works of modules returned, each of which got a folder of its own, and may take ``longest_s`` seconds.

    ``modules`` tells of each whether there are tests of it that are marked ``full``.

    One process does them in the order of the modules, beside the tests. A second one takes those that have not begun, the last ones
    first, once a test has to wait: before that it would compete with the tests, which alone leave cores idle at the end.
    """

    def __init__(self, modules: Mapping[ModuleType, bool], root: Path, longest_s: float = _LONGEST_S):
        self._answers: dict[Work, Future[bytes]] = {
            work: Future()
            for module, full in modules.items()
            for work in getattr(module, "AHEAD", ())
            if full or not hasattr(work, "of_all_tests")
        }
        self._left = deque(self._answers)
        self._root, self._longest_s = root, longest_s
        self._lanes = ThreadPoolExecutor(2)
        self._theirs, self._ours = Pipe(duplex=False)  # it closes with the session
        self._helped = False
        if self._left:
            self._lanes.submit(self._do_all, self._left.popleft)

    def by(self, work: Work) -> Any:
        """What a work returned; waits for it.

        Raises:
            WorkFailed: it raised, or did not end in time.
            BrokenProcessPool: its process died.
        """
        assert work in self._answers, f"no module that was collected has {_name(work)} in AHEAD"
        if not (self._answers[work].done() or self._helped):
            self._helped = True
            self._lanes.submit(self._do_all, self._left.pop)
        return pickle.loads(self._answers[work].result())

    def close(self) -> None:
        """End what nobody asked for any more, with all processes that it started."""
        self._left.clear()
        self._ours.close()
        self._lanes.shutdown()
        self._theirs.close()

    def _do_all(self, take: Callable[[], Work]) -> None:
        process: tuple[ProcessPoolExecutor, int] | None = None
        while self._left:
            try:
                work = take()
            except IndexError:
                break  # the other process has begun the last one
            folder = self._root / _name(work)
            try:
                pool, leader = process = process or self._process()
                longest_s = getattr(work, "longest_s", self._longest_s)
                answer = pool.submit(_answer_of, work, folder, longest_s).result()
                self._answers[work].set_result(answer)
            except BaseException as error:
                self._answers[work].set_exception(self._told_late(folder) or error)
                if process is not None and isinstance(error, BrokenProcessPool):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(leader, signal.SIGKILL)  # what it has started
                    pool.shutdown()
                    process = None
        if process is not None:
            process[0].shutdown()

    def _told_late(self, folder: Path) -> WorkFailed | None:
        """The error of a work whose time was over."""
        where = _where(folder)
        if not (where.exists() and (told := where.read_text())):
            return None
        return WorkFailed(f"{folder.name} took longer than it may:\n{told}")

    def _process(self) -> tuple[ProcessPoolExecutor, int]:
        """What does works, and the number of its process.

        It has to be shut down before it is forgotten: Python 3.12.1's thread of a broken pool locks itself out, for ever, where
        that pool is gone before the thread has ended.
        """
        from tests.servers import processes  # which only sessions with tests that want them shall start

        pool = ProcessPoolExecutor(1, processes(), _begin, (self._theirs,))
        try:
            return pool, pool.submit(os.getpid).result()
        except BaseException:
            pool.shutdown()
            raise


def _name(work: Work) -> str:
    return f"{work.__module__}.{work.__qualname__}"


_in_time: ThreadPoolExecutor


def _begin(session: Connection) -> None:
    """In the process that does works."""
    global _in_time
    os.setsid()
    _in_time = ThreadPoolExecutor(1)
    # A thread, and what it starts, is as nice as this one was when it began.
    _in_time.submit(os.getpid).result()
    os.nice(_NICENESS)
    threading.Thread(target=_end_with, args=(session,), daemon=True).start()


def _end_with(session: Connection) -> None:
    wait([session])
    os.killpg(0, signal.SIGKILL)


def _where(folder: Path) -> Path:
    """The file for where a work is when its time is over."""
    return folder.with_name(f"{folder.name}.where")


def _answer_of(work: Work, folder: Path, longest_s: float) -> bytes:
    folder.mkdir()
    with _where(folder).open("w") as where:
        # It ends the process also where a thread is in C, which no exception reaches.
        faulthandler.dump_traceback_later(longest_s, exit=True, file=where)
        try:
            found = _in_time.submit(work, folder).result() if hasattr(work, "keeps_time") else work(folder)
            # Not by the pool: torch makes that pass tensors through a socket of the sender, which may be gone.
            return pickle.dumps(found)
        except BaseException:
            raise WorkFailed(traceback.format_exc()) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
