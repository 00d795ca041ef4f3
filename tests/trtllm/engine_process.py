"""An engine in a process of its own, over the package's double, and the ``LLM`` by which another process calls it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.spawn import processes


@contextlib.contextmanager
def running(sockets: Mapping[str, Path], workers: int) -> Iterator[None]:
    """An engine of each generation, that listens at its socket for one caller, who says what its weights are."""
    engines = []
    try:
        for generation, socket in sockets.items():
            ours, theirs = processes().Pipe(duplex=False)
            arguments = (generation, str(socket), workers, theirs)
            engines.append((processes().Process(target=_main, args=arguments, daemon=True), ours))
            engines[-1][0].start()
            theirs.close()
        for _, ours in engines:
            ours.recv_bytes()
        yield
    finally:
        for engine, _ in engines:
            engine.kill()
            engine.join(10)


def _main(generation: str, socket: str, workers: int, ready: Connection) -> None:
    import torch

    from .engine_double import DoubleLLM
    from .package_double import install

    torch.set_num_threads(1)
    extension = install(generation)
    with Listener(socket) as listener:
        ready.send_bytes(b"listening")
        with listener.accept() as caller:
            llm = DoubleLLM(extension, pickle.loads(caller.recv_bytes()), workers=workers)
            while True:
                try:
                    request = caller.recv_bytes()
                except EOFError:
                    return  # the caller has finished
                method, args = pickle.loads(request)
                caller.send_bytes(pickle.dumps(llm._collective_rpc(method, args, non_block=True)))


class RemoteLLM:
    """The engine that listens at ``socket``; a future is the connection and the worker's place in its answer."""

    def __init__(self, socket: Path, specs: Sequence[Any]) -> None:
        self._engine = Client(str(socket))
        self._engine.send_bytes(pickle.dumps(list(specs)))

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Callable[[float], Any]]:
        assert non_block
        self._engine.send_bytes(pickle.dumps((method, args)))
        return [self._answers]

    def _answers(self, timeout_s: float) -> list[Any]:
        if not self._engine.poll(timeout_s):
            raise TimeoutError
        answers: list[Any] = pickle.loads(self._engine.recv_bytes())
        return answers


def answers_of(futures: Sequence[Any], timeout_s: float) -> list[Any]:
    """The driver's wait."""
    return [answer for future in futures for answer in future(timeout_s)]
