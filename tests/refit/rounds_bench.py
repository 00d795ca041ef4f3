"""What a meeting of the ranks costs, old and new in turns: ``python -m tests.refit.rounds_bench OLD . [--engines 1] [--rounds 250]``.

Each argument is a tree of this repository. For each of them a trainer and engines, in a process each, meet as before and after a refit.
All trees run in the same seconds and take turns, so that whatever else the machine does slows each of them alike. Between its turns a process walks
through memory, as training does, and engines come last. A round is timed from the last rank's arrival to the last rank's answer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

# Seconds: of a tree's turn, from begin to commit, and from the trainer's arrival to the engines'.
TURN, COMMIT, LATER = 12e-3, 6e-3, 4e-4
WARM_UP = 5
PARTS = ("integration", "workers", "recipes")
say = Console(highlight=False, soft_wrap=True).print


def as_package(tree: Path, place: Path) -> str:
    """A folder from which ``tree`` is imported."""
    package = place / "rlrefit"
    package.mkdir(parents=True)
    for part in PARTS:
        (package / part).symlink_to(tree / part)
    (package / "__init__.py").symlink_to(tree / "package" / "__init__.py")
    return str(place)


def run(rank: int, pipe: Connection, path: str, engines: int, rounds: int, of: int) -> None:
    sys.path.insert(0, path)
    import torch

    import rlrefit
    from rlrefit.integration.control import Rendezvous, open_rendezvous
    from rlrefit.integration.control.channel import Channel
    from rlrefit.integration.control.world import RefitWorld

    assert path in str(rlrefit.__path__[0]), "another tree was imported"
    torch.set_num_threads(1)
    server = open_rendezvous("127.0.0.1", 1, engines) if rank == 0 else None
    if server is not None:
        pipe.send(server.rendezvous.to_json())
    channel = Channel(Rendezvous.from_json(pipe.recv()), RefitWorld(rank, 1, engines), 60.0)
    elsewhere = torch.zeros(4 << 20, dtype=torch.uint8)

    def meet(topic: str, at: float, version: int | None) -> tuple[float, float]:
        time.sleep(max(0.0, at - time.monotonic()))
        while rank and time.monotonic() < at + LATER:
            pass
        came = time.monotonic()
        channel.barrier(topic, 0, version)
        return came, time.monotonic()

    channel.barrier("ready")
    pipe.send(None)
    start: float = pipe.recv()
    times = []
    for number in range(rounds):
        begin = start + number * of * TURN
        if time.monotonic() < begin - 2e-3:
            elsewhere.add_(1)
        times.append(
            (
                meet(f"begin/{number}", begin, number),
                meet(f"commit/{number}", begin + COMMIT, None),
            )
        )
    pipe.send(times)
    channel.close()
    if server is not None:
        server.close()
        pipe.recv()


def durations(ranks: list[Any], which: int) -> list[float]:
    """Seconds of the rounds before (0) or after (1) a refit."""
    rounds = [[times[which] for times in one] for one in zip(*ranks, strict=True)][WARM_UP:]
    return [max(left for _, left in one) - max(came for came, _ in one) for one in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=250)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        worlds = []
        for number, tree in enumerate(options.trees):
            path = as_package(tree.resolve(), Path(folder) / str(number))
            ends = [context.Pipe() for _ in range(1 + options.engines)]
            for rank, (_, end) in enumerate(ends):
                given = (rank, end, path, options.engines, options.rounds, len(options.trees))
                context.Process(target=run, args=given, daemon=True).start()
            worlds.append([pipe for pipe, _ in ends])
        for pipes in worlds:
            meeting = pipes[0].recv()
            for pipe in pipes:
                pipe.send(meeting)
        for pipe in (pipe for pipes in worlds for pipe in pipes):
            pipe.recv()
        start = time.monotonic() + 0.1
        for number, pipes in enumerate(worlds):
            for pipe in pipes:
                pipe.send(start + number * TURN)
        found = [[pipe.recv() for pipe in pipes] for pipes in worlds]
        for pipes in worlds:
            pipes[0].send(None)
    for which, name in enumerate(("begin", "commit")):
        first = durations(found[0], which)
        for tree, ranks in zip(options.trees, found, strict=True):
            taken = durations(ranks, which)
            ratio = median(one / other for one, other in zip(taken, first, strict=True))
            say(
                f"{name:6} {tree!s:20} {1e6 * median(taken):6.0f} us, at least {1e6 * min(taken):6.0f}, ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
