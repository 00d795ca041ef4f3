"""Processes on hosts, each a rank of something, which can be asked while they run and killed."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from tests.servers import processes

from .namespaces import Host


class Crew:
    """The processes of ``fn(rank, talk, *args)``; made by :func:`crew_of`."""

    def __init__(
        self, fn: Callable[..., Any], hosts: Sequence[Host], args: Sequence[Any], env: dict[str, str]
    ):
        context = processes()
        self.hosts = hosts
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        for rank, host in enumerate(hosts):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(fn, rank, host, theirs, args, env))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def hear(self, rank: int, within_s: float = 60.0) -> Any:
        """What a rank says next, or returns; raises what it raised. EOFError where it has died."""
        if not self._pipes[rank].poll(within_s):
            raise AssertionError(f"rank {rank} said nothing within {within_s} s")
        found = pickle.loads(self._pipes[rank].recv_bytes())
        if isinstance(found, BaseException):
            raise found
        return found

    def hear_all(self, within_s: float = 60.0) -> list[Any]:
        """What each rank says next."""
        deadline = time.monotonic() + within_s
        return [self.hear(rank, max(0.0, deadline - time.monotonic())) for rank in range(len(self.hosts))]

    def tell(self, rank: int, what: Any = None) -> None:
        """Let a rank that waits in ``talk.hear()`` go on."""
        self._pipes[rank].send_bytes(pickle.dumps(what))

    def kill_on(self, host: Host) -> None:
        """Kill all ranks of a host at once."""
        for process, where in zip(self._processes, self.hosts, strict=True):
            if where is host:
                process.kill()

    def close(self) -> None:
        """Kill what still runs."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join(5)
            pipe.close()


class Talk:
    """A rank's end of its pipe to the test."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def say(self, what: Any) -> None:
        """To :meth:`Crew.hear`."""
        self._pipe.send_bytes(pickle.dumps(what))

    def hear(self) -> Any:
        """From :meth:`Crew.tell`."""
        return pickle.loads(self._pipe.recv_bytes())


@contextmanager
def crew_of(
    fn: Callable[..., Any], hosts: Sequence[Host], *args: Any, env: dict[str, str] | None = None
) -> Iterator[Crew]:
    """Start ``fn(rank, talk, *args)`` on each of ``hosts``; what it returns or raises is heard last."""
    made = Crew(fn, hosts, args, env or {})
    try:
        yield made
    finally:
        made.close()


def run_on(
    fn: Callable[..., Any], hosts: Sequence[Host], *args: Any, env: dict[str, str] | None = None
) -> list[Any]:
    """What ``fn(rank, talk, *args)`` returns on each of ``hosts``."""
    with crew_of(fn, hosts, *args, env=env) as made:
        return made.hear_all(240.0)


def _main(
    fn: Callable[..., Any], rank: int, host: Host, pipe: Connection, args: Sequence[Any], env: dict[str, str]
) -> None:
    try:
        host.enter()
        os.environ.update(env)
        import torch

        torch.set_num_threads(1)
        found = fn(rank, Talk(pipe), *args)
    except BaseException as error:
        found = error
    pipe.send_bytes(pickle.dumps(found))
    pipe.close()
    # Peers may sit in a collective; leave without handlers that would wait for them.
    os._exit(0)
