"""What begin and commit of a refit cost with many weights: ``python -m tests.refit.begin_bench [--weights 18867] [--refits 200]``.

A trainer and an engine in a process each, over gloo, with weights of 8 elements that all change before each refit. Between two
refits each process walks through memory, as training does, so that nothing is in a cache. The look at where weights lie is timed
alone, too: as endpoints ask (:class:`StorageLook`), and with a key made anew each time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from rich.console import Console

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.endpoints import storage_key
from rlrefit.integration.weights.manifest import TensorSpec

from .synthetic import FP32, SyntheticDestination, SyntheticSource, whole

WARM_UP = 3
say = Console(highlight=False, soft_wrap=True).print


class _Timed:
    """How long looks take."""

    def __init__(self, look: Callable[[], Hashable], tensors: Iterable[torch.Tensor]):
        self._look, self._tensors = look, list(tensors)
        self.looks: list[float] = []
        self.keys: list[float] = []

    def __call__(self) -> Hashable:
        start = time.perf_counter()
        key = self._look()
        self.looks.append(time.perf_counter() - start)
        return key

    def make_anew(self) -> None:
        start = time.perf_counter()
        storage_key(self._tensors)
        self.keys.append(time.perf_counter() - start)


def run(rank: int, pipe: Connection, weights: int, refits: int) -> None:
    torch.set_num_threads(1)
    specs = [TensorSpec(f"model.layers.{i}.weight", (8,), FP32) for i in range(weights)]
    server = open_rendezvous("127.0.0.1", 1, 1) if rank == 0 else None
    if server is not None:
        pipe.send(server.rendezvous.to_json())
    meeting = Rendezvous.from_json(pipe.recv())
    endpoint: Any = (SyntheticDestination if rank else SyntheticSource)(specs, whole(specs))
    held = list((endpoint._wanted if rank else endpoint._held).values())
    endpoint.storage_key = timed = _Timed(endpoint.storage_key, held)
    session = RefitSession.open(meeting, rank, lambda: endpoint, RefitConfig(transport="p2p", timeout_s=60.0))
    elsewhere = torch.zeros(64 << 20, dtype=torch.uint8)
    records = []
    for version in range(WARM_UP + refits):
        if rank == 0:
            torch._foreach_zero_(held)
            torch._foreach_add_(held, float(version))
        elsewhere.add_(1)
        timed.make_anew()
        elsewhere.add_(1)
        pipe.send(version)
        pipe.recv()
        records.append(session.refit(version))
        assert rank == 0 or all(bool((tensor == version).all()) for tensor in held)
    session.close()
    if server is not None:
        server.close()
    seconds = {
        "begin": [record.seconds["handshake"] for record in records],
        "commit": [record.seconds["commit"] for record in records],
        "look": timed.looks[-refits:],
        "key anew": timed.keys,
    }
    pipe.send({name: taken[-refits:] for name, taken in seconds.items()})


def _send(pipes: Sequence[Connection], value: Any) -> None:
    for pipe in pipes:
        pipe.send(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=int, default=18_867)
    parser.add_argument("--refits", type=int, default=200)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=run, args=(rank, end, options.weights, options.refits), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    pipes = [pipe for pipe, _ in ends]
    _send(pipes, pipes[0].recv())
    for _ in range(WARM_UP + options.refits):
        for pipe in pipes:
            pipe.recv()
        _send(pipes, None)
    for who, pipe in zip(("trainer", "engine"), pipes, strict=True):
        for name, taken in pipe.recv().items():
            say(f"{who:8} {name:9} {1e3 * median(taken):7.3f} ms, at least {1e3 * min(taken):7.3f}")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
