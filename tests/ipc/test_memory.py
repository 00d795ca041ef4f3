"""Memory of peers: whose it is, and what stays open when it can't be mapped. The driver is played here."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection

from rlrefit.integration.transport.ipc.memory import process_name


def _tell_name(pipe: Connection) -> None:
    pipe.send(process_name())


def test_a_forked_process_does_not_take_its_parent_for_itself() -> None:
    ours = process_name()
    inner, outer = os.pipe()
    child = os.fork()
    if not child:
        os.write(outer, process_name().encode())
        os._exit(0)
    os.close(outer)
    with os.fdopen(inner) as told:
        assert told.read() not in ("", ours)
    assert os.waitpid(child, 0)[1] == 0
    assert process_name() == ours


def test_a_process_that_was_started_anew_has_another_name() -> None:
    spawn = get_context("spawn")
    inner, outer = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_tell_name, args=(outer,))
    child.start()
    assert inner.recv() != process_name()
    child.join()
