"""Run a function on several ranks over gloo, each in a process of its own, and bring back what they return."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time; the text holds its traceback."""


def free_port() -> int:
    """A TCP port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _packed(succeeded: bool, value: Any) -> bytes:
    # Not Connection.send: torch makes that pass tensors through a socket of the sender, which may be gone.
    return pickle.dumps((succeeded, value))


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    args: Any,
    pipe: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
    )
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        pipe.send_bytes(_packed(True, fn(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(_packed(False, traceback.format_exc()))
        # The peers may sit in a collective; leave without the exit handlers that would wait for them.
        os._exit(1)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` ranks of one gloo world, and return their results by rank.

    ``fn`` must be a module-level function; arguments and results are pickled (tensors by value, so send
    small ones). ``torch.distributed`` is initialised when ``fn`` starts, with one thread per rank.

    Raises:
        RankFailed: with the first failing rank's traceback, or the ranks that did not finish in
            ``timeout_s`` seconds. The other ranks are killed.
    """
    context = mp.get_context("spawn")
    port = free_port()
    pipes: dict[Connection, int] = {}
    processes = []
    results: dict[int, Any] = {}
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(fn, rank, world_size, port, timeout_s, args, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    try:
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(
                    f"ranks {sorted(pipes.values())} of {world_size} ran longer than {timeout_s} s"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    raise RankFailed(
                        f"rank {rank} of {world_size} died with exit code {processes[rank].exitcode}"
                    ) from None
                if not succeeded:
                    raise RankFailed(f"rank {rank} of {world_size}:\n{value}")
                results[rank] = value
        for process in processes:
            process.join(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(5)
    return [results[rank] for rank in range(world_size)]
