"""Many trials at a time: most of them wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from .crew import Crew
from .judge import judge
from .table import Result
from .trials import WORLDS, Trial, draw


def run_trials(
    seed: int,
    count: int,
    crews: int,
    chosen: Callable[[Trial], bool] = lambda trial: True,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run ``count`` trials of a seed, ``crews`` at a time, and return what came of them in their order.

    Args:
        seed: of all that is chosen.
        count: trials.
        crews: that run beside one another.
        chosen: says of each whether it is run.
        done: told of each as it ends, from threads.
    """
    with ExitStack() as stack, ThreadPoolExecutor(crews) as pool:
        idle: SimpleQueue[Crew] = SimpleQueue()
        for _ in range(crews):
            idle.put(stack.enter_context(Crew()))

        def with_a_crew[T](work: Callable[[Crew], T]) -> T:
            crew = idle.get()
            try:
                return work(crew)
            finally:
                idle.put(crew)

        counted = pool.map(lambda world: with_a_crew(lambda crew: crew.count(world)), WORLDS)
        counts = dict(zip(WORLDS, counted, strict=True))
        trials = draw(seed, count, counts)

        def run(trial: Trial) -> Result:
            seen = with_a_crew(lambda crew: crew.run(trial, counts))
            result = seen, judge(seen)
            done(result)
            return result

        return list(pool.map(run, filter(chosen, trials)))
