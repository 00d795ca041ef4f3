"""Run a function on several ranks over gloo, each in a process of its own, and bring back what they return."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from random import SystemRandom
from typing import Any

from tests.servers import processes

# Of what is done beside tests too, in the time that they leave idle.
PATIENT_S = 400.0


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time, if only after it had answered; the text holds its traceback.

    Of one that crashed or was late it holds those of all its threads.
    """


def free_port() -> int:
    """A TCP port of this host that nobody has at the moment.

    Not one that the kernel gives to whoever asks for any, as each group of ranks does: it might do so before this one is used.
    """
    taken_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Ray's workers have those below 20000.
    ports = range(20_000, taken_from) if taken_from > 22_000 else range(1 << 15, 1 << 16)
    while True:
        port = SystemRandom().choice(ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _main(body: Callable[..., None], args: tuple[Any, ...], pipe: Connection, where: Path) -> None:
    # A signal that ends this process has it tell first where it is.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(where.open("w"))

    def answer(succeeded: bool, value: Any) -> None:
        # Not Connection.send: torch makes that pass tensors through a socket of the sender, which may be gone.
        pipe.send_bytes(pickle.dumps((succeeded, value, time.monotonic())))

    try:
        import torch

        torch.set_num_threads(1)
        body(*args, lambda result: answer(True, result))
    except BaseException:
        answer(False, traceback.format_exc())
        # The peers may sit in a collective; leave without the exit handlers that would wait for them.
        os._exit(1)


def _in_a_group(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    port: int,
    timeout_s: float,
    rank: int,
    answer: Callable[[Any], None],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
        VLLM_DIST_IDENT=f"{os.getppid()}-{port}",  # as vLLM's CPU worker; names the shared memory of its groups
    )
    import torch.distributed as dist

    # A rank that comes late is told by who waits for all, before another rank's own wait for it ends.
    limit = timedelta(seconds=2 * timeout_s)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)
    answer(fn(rank, *args))
    dist.destroy_process_group()


def _alone(
    fn: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], answer: Callable[[Any], None]
) -> None:
    os.environ.update(environment)
    answer(fn(*args))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    made_by: Callable[[], ForkServerContext] = processes,
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` ranks of one gloo world, and return their results by rank.

    ``fn`` must be a module-level function; arguments and results are pickled (tensors by value, so send
    small ones). With ``made_by=vllm_processes`` the ranks have vLLM loaded, and not Megatron.

    Raises:
        RankFailed: with the first failing rank's traceback, of several that died or raised all, or the ranks that did not
            finish in ``timeout_s`` seconds. The other ranks are killed. So too where all have answered, and one raises
            or dies as it leaves, or does not end in that time.
    """
    of_all = (fn, args, world_size, free_port(), timeout_s)
    arguments = [(*of_all, rank) for rank in range(world_size)]
    return _run(fn.__name__, _in_a_group, arguments, timeout_s, made_by)


def run_alone(
    fn: Callable[..., Any],
    *args: Any,
    environment: dict[str, str],
    timeout_s: float = 240.0,
    made_by: Callable[[], ForkServerContext] = processes,
) -> Any:
    """As :func:`run_ranks`, of ``fn(*args)`` in one process, in no group, with the ``environment`` added to this one's."""
    return _run(fn.__name__, _alone, [(fn, args, environment)], timeout_s, made_by)[0]


def run_together(*worlds: Callable[[], Any]) -> list[Any]:
    """Call functions beside one another, such as the two sides of a refit, and return what they return.

    Raises:
        BaseException: the first in time, whatever its place, when all have ended; the others are its notes. What one
            side meets is most often what the other one does first.
    """
    raised: list[BaseException] = []

    def run(world: Callable[[], Any]) -> Any:
        try:
            return world()
        except BaseException as error:
            raised.append(error)
            raise

    with ThreadPoolExecutor(len(worlds)) as pool:
        futures = [pool.submit(run, world) for world in worlds]
    if raised:
        first, *later = raised
        for error in later:
            first.add_note(f"Later, beside it:\n{''.join(traceback.format_exception_only(error))}")
        raise first
    return [future.result() for future in futures]


def run_sides(
    train: Callable[..., Any],
    train_ranks: int,
    serve: Callable[..., Any],
    gen_ranks: int,
    cases: Sequence[Any],
) -> list[tuple[list[Any], list[Any]]]:
    """Cases one after another in the same processes of a trainer's world and of an engine's.

    Args:
        train, serve: as :func:`run_ranks`'s, called with ``cases``; each gives a report for each of them.

    Returns:
        For each case, the reports of the trainer's ranks and of the engine's.
    """
    sides = run_together(
        lambda: run_ranks(train, train_ranks, cases, timeout_s=PATIENT_S),
        lambda: run_ranks(serve, gen_ranks, cases, timeout_s=PATIENT_S),
    )
    by_case = (zip(*ranks, strict=True) for ranks in sides)
    return [(list(trainers), list(engines)) for trainers, engines in zip(*by_case, strict=True)]


def _run(
    of: str,
    body: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    timeout_s: float,
    made_by: Callable[[], ForkServerContext],
) -> list[Any]:
    """What ``body`` answers in one process for each of the ``arguments``."""
    context, size = made_by(), len(arguments)
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        started: list[_Started] = []
        try:
            for rank, args in enumerate(arguments):
                ours, theirs = context.Pipe(duplex=False)
                where = Path(folder, str(rank))
                where.touch()  # of one that does not get far
                process = context.Process(target=_main, args=(body, args, theirs, where))
                process.start()
                theirs.close()
                started.append(_Started(f"{of}: rank {rank} of {size}", process, ours, where))
            return _collect(of, started, timeout_s)
        finally:
            for one in started:
                if one.process.is_alive():
                    one.process.kill()
                one.process.join(5)
                one.pipe.close()


@dataclass(frozen=True)
class _Started:
    """A process that was started, the pipe on which it answers, and the file for where it is when a signal ends it."""

    name: str
    process: ForkServerProcess
    pipe: Connection
    where: Path

    def end(self) -> str:
        """Where it was when it crashed, or is now; it has ended then."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(5)
        return self.where.read_text()


def _collect(of: str, started: Sequence[_Started], timeout_s: float) -> list[Any]:
    waiting = {one.pipe: rank for rank, one in enumerate(started)}
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready: list[Any] = wait([*waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values())
            places = "".join(f"\nrank {rank}:\n{started[rank].end()}" for rank in late)
            raise RankFailed(f"{of}: ranks {late} of {len(started)} ran longer than {timeout_s} s{places}")
        failed: list[tuple[float, str]] = []
        for pipe in ready:
            rank = waiting.pop(pipe)
            one = started[rank]
            try:
                succeeded, results[rank], at = pickle.loads(pipe.recv_bytes())
            except EOFError:
                one.process.join(5)
                # Before all that others raised, perhaps because of it.
                failed.append((0.0, f"{one.name} died with exit code {one.process.exitcode}\n{one.end()}"))
                continue
            if not succeeded:
                failed.append((at, f"{one.name}:\n{results[rank]}"))
        if failed:
            raise RankFailed("\n".join(text for _, text in sorted(failed)))
    for one in started:
        one.process.join(max(1.0, deadline - time.monotonic()))
    bad_ends = [f"{one.name} had answered, and {end}" for one in started if (end := _bad_end(one, timeout_s))]
    if bad_ends:
        raise RankFailed("\n".join(bad_ends))
    return [results[rank] for rank in range(len(started))]


def _bad_end(one: _Started, timeout_s: float) -> str | None:
    """How a process that has given its answer did not end as it should."""
    if one.process.is_alive():
        return f"did not end in {timeout_s} s\n{one.end()}"
    if one.process.exitcode == 0:
        return None
    try:
        if one.pipe.poll():  # else a process that it left behind holds the other end
            return f"raised:\n{pickle.loads(one.pipe.recv_bytes())[1]}"
    except EOFError:
        pass
    return f"died with exit code {one.process.exitcode}\n{one.end()}"
