"""Processes that a test starts, each with a CUDA context of its own, and that end with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def spawned(
    main: Callable[..., None], arguments: Sequence[tuple[Any, ...]], ends_within_s: float = 20.0
) -> Iterator[Any]:
    """The queue into which processes put what they tell; inside, they run.

    Args:
        main: of each, with its arguments and the queue.
        arguments: of each process.
        ends_within_s: for how long each is waited for at the end, unless the test fails, before it is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [spawn.Process(target=main, args=(*own, results)) for own in arguments]
    for process in processes:
        process.start()
    patience = 0.0
    try:
        yield results
        patience = ends_within_s
    finally:
        for process in processes:
            process.join(patience)
            process.kill()
