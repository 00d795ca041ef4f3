"""One process for each rank of the benchmark; the first failure ends all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ...integration.errors import RefitError
from ..plan.catalog import CatalogError, LayoutError
from .options import RunOptions

_HOST = "127.0.0.1"
# The first failure has the cause; the others lost their peer. Wait this long for their errors.
_GRACE_S = 2.0


class BenchFailed(RuntimeError):
    """A rank raised or died; the text says which and why."""


def run_ranks[O: RunOptions](main: Callable[[int, O, TCPStore], Any], options: O) -> Any:
    """Call ``main(rank, options, store)`` in ``options.world_size`` processes; returns what rank 0 returns.

    Args:
        main: a function of a module; what it returns is pickled.
        options: of the run.

    Raises:
        BenchFailed: with the first failing rank's error. The other ranks are ended.
    """
    store = TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=options.timeout_s)
    )
    if options.device == "cuda":
        # Each rank's CUDA starts in a process that nothing has touched.
        context: Any = mp.get_context("spawn")
    else:
        # Forked from a server that has torch loaded, which is most of a small run's time.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.run"])
    processes = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(options.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(main, rank, options, store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        return _collect(pipes, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(5)


def _collect(pipes: dict[Connection, int], processes: list[Any]) -> Any:
    result: Any = None
    failures: dict[int, str] = {}
    deadline: float | None = None
    while pipes and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                succeeded, value = False, f"it died with exit code {processes[rank].exitcode}"
            if not succeeded:
                failures[rank] = value
                deadline = deadline or time.monotonic() + _GRACE_S
            elif rank == 0:
                result = value
    if failures:
        rank, first = next(iter(failures.items()))
        also = f" (and ranks {sorted(set(failures) - {rank})} after it)" if len(failures) > 1 else ""
        raise BenchFailed(f"rank {rank} failed{also}:\n{first}")
    for process in processes:
        process.join(60)
    return result


def _rank[O: RunOptions](
    main: Callable[[int, O, TCPStore], Any],
    rank: int,
    options: O,
    port: int,
    pipe: Connection,
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        store = TCPStore(
            _HOST,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=options.timeout_s),
        )
        # Pickled here and not by the pipe: torch makes that pass tensors through a socket of the sender.
        pipe.send_bytes(pickle.dumps((True, main(rank, options, store))))
    except BaseException as error:
        # These say themselves what is wrong and what to do; of others it matters where they arose.
        told = isinstance(error, (RefitError, CatalogError, LayoutError))
        text = f"{type(error).__name__}: {error}" if told else traceback.format_exc()
        pipe.send_bytes(pickle.dumps((False, text)))
        # Peers may sit in a collective with this one; leave without the exit handlers that wait for them.
        os._exit(1)


def _end_with_parent() -> None:
    """End this process when the command's is gone, however it went: a rank left behind would hold its GPU."""
    parent = mp.parent_process()
    assert parent is not None, "ranks are children of the command"
    wait([parent.sentinel])
    os._exit(1)
