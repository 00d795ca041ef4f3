"""Runs trials: processes for the ranks, signals to the victim, and the next epoch, in which all must heal."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.servers import processes

from .judge import Verdict, judge
from .moments import Place
from .rank import GRACE_S, Ended, Observed, Order, Part, Struck, work
from .trials import STEPPED, VERSIONS, WORLDS, Counts, Kind, Trial, World, draw, healing

Result = tuple[Observed, Verdict]

# For how long a rank that hangs is still watched: how late it is belongs into the table.
_WATCH_S = 20.0
_HEALING_S = 30.0
_ATTEMPTS = 4


class _Member:
    """A process that takes orders."""

    def __init__(self, folder: Path, number: int):
        context = processes()
        self.pipe, theirs = context.Pipe()
        self._stacks = folder / f"stacks{number}"
        self.process = context.Process(target=work, args=(theirs, str(self._stacks)))
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where its main thread is."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self._stacks.read_text()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Crew:
    """As many processes as a world has ranks, kept over trials; ``with`` it."""

    def __enter__(self) -> Crew:
        self._folder = tempfile.TemporaryDirectory()
        self._made = 0
        self._members: list[_Member] = []
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.end()
        self._folder.cleanup()

    def count(self, world: World, delta: bool) -> Sequence[Mapping[Place, int]]:
        """Points of the library that each rank of a world passes without any fault, by part and window."""
        first = Order(self._host(world, 0), world, 0, VERSIONS, 60.0, "sampled", counts=True, delta=delta)
        ended = self._epoch(first, {*range(sum(world))})
        assert len(ended) == sum(world), f"only ranks {sorted(ended)} of {world} ended without any fault"
        assert not any(e.error for e in ended.values()), f"without any fault: {ended}"
        assert all([*e.sparse.values()] == [False, delta, delta] for e in ended.values()), f"kinds: {ended}"
        return [ended[rank].seen for rank in range(sum(world))]

    def run(self, trial: Trial, counts: Counts) -> Observed:
        """Run one trial; again with other limits or at another point if the fault could not come about."""
        for _ in range(_ATTEMPTS):
            seen = Observed(trial)
            self._inject(seen, counts)
            self._heal(seen)
            if seen.struck is not None or seen.hung:
                break
            trial, counts = _again(seen, counts)
        return seen

    def _inject(self, seen: Observed, counts: Counts) -> None:
        trial = seen.trial
        rendezvous = self._host(trial.world, 0)
        at = 0
        if trial.kind in STEPPED:
            at = int(trial.fraction * counts[trial.world][trial.victim][trial.place])
        for rank in range(trial.size):
            order = Order(
                rendezvous,
                trial.world,
                rank,
                VERSIONS,
                trial.timeout_s,
                trial.verify,
                delta=trial.delta,
                sleeps=trial.sleeps,
                masks=trial.masks,
            )
            if rank == trial.victim:
                order = replace(order, trial=trial, at=at)
            if rank == trial.slow:
                order = replace(order, slow_part=trial.place[0])
            self._members[rank].pipe.send(order)
        _Watch(self._members[: trial.size], seen).run()
        for rank in seen.hung:
            self._replace(rank)
        if seen.killed:
            self._replace(trial.victim)
        if trial.kind is Kind.RESTARTED:
            seen.struck = Struck(time.monotonic(), "between the epochs")

    def _heal(self, seen: Observed) -> None:
        """The survivors with what they hold, and fresh processes for those that died or hung, meet anew."""
        trial = seen.trial
        # A victim whose model was changed is started anew with the right one.
        fresh = {*seen.hung}
        claims = None
        if trial.kind is Kind.RESTARTED:
            fresh.add(trial.victim)
            claims = VERSIONS[-1]
        if seen.killed or (seen.struck is not None and seen.struck.weight):
            fresh.add(trial.victim)
        first = Order(
            self._host(trial.world, 1),
            trial.world,
            0,
            healing(trial),
            _HEALING_S,
            trial.verify,
            delta=trial.delta,
            sleeps=trial.sleeps,
            masks=trial.masks,
            claims=claims,
        )
        seen.healed = self._epoch(first, fresh)
        seen.heal_hung = sorted(set(range(trial.size)) - set(seen.healed))
        for rank in seen.heal_hung:
            self._replace(rank)

    def _epoch(self, first: Order, fresh: set[int]) -> dict[int, Ended]:
        """An epoch without faults, of ranks with the order of the ``first`` one."""
        size = sum(first.world)
        for rank in range(size):
            self._members[rank].pipe.send(replace(first, rank=rank, fresh=rank in fresh))
        waiting = {self._members[rank].pipe: rank for rank in range(size)}
        ended: dict[int, Ended] = {}
        deadline = time.monotonic() + first.timeout_s + GRACE_S + _WATCH_S
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                with suppress(EOFError):  # it died
                    ended[rank] = pipe.recv()  # type: ignore[union-attr]
        return ended

    def _host(self, world: World, epoch: int) -> Any:
        """Have a process for each rank, and the rendezvous of an epoch at the first."""
        while len(self._members) < sum(world):
            self._members.append(self._make())
        pipe = self._members[0].pipe
        pipe.send((*world, epoch))
        return pipe.recv()

    def _replace(self, rank: int) -> None:
        self._members[rank].end()
        self._members[rank] = self._make()

    def _make(self) -> _Member:
        self._made += 1
        return _Member(Path(self._folder.name), self._made)


def _again(seen: Observed, counts: Counts) -> tuple[Trial, Counts]:
    """What to try when the fault could not come about."""
    trial = seen.trial
    if any(ended.error is not None for ended in seen.ended.values()):  # the machine was slower than the limit
        return replace(trial, timeout_s=2 * trial.timeout_s), counts
    if trial.kind in STEPPED:  # the victim has not passed as many points
        passed = seen.ended[trial.victim].seen.get(trial.place, 0)
        return trial, {**counts, trial.world: [{**of, trial.place: passed} for of in counts[trial.world]]}
    return replace(trial, seed=trial.seed + "+", fraction=trial.fraction * 0.8), counts


class _Watch:
    """Waits for the ranks of a trial, and does to the victim what it can't do to itself."""

    def __init__(self, members: Sequence[_Member], seen: Observed):
        self._members, self._seen, self._trial = members, seen, seen.trial
        self._waiting = {member.pipe: rank for rank, member in enumerate(members)}
        # When something is to be done to the victim, by the clock.
        self._due = float("inf")
        self._frozen = False
        self._released_at = 0.0
        self._started_at = time.monotonic()

    def run(self) -> None:
        seen, trial = self._seen, self._trial
        while self._waiting:
            pause = min(self._due, self._deadline()) - time.monotonic()
            for pipe in wait(list(self._waiting), timeout=max(0.0, pause)):
                self._take(pipe)
            now = time.monotonic()
            if now >= self._due:
                self._act()
            if self._frozen and trial.kind is Kind.FROZEN and set(self._waiting.values()) == {trial.victim}:
                self._act()
            if now >= self._deadline() and self._waiting:
                self._give_up()
                break
        if seen.struck is not None:
            struck = seen.struck.at
            others = [e.at - struck for rank, e in seen.ended.items() if rank != trial.victim]
            seen.seconds = max(others, default=0.0)
            if trial.victim in seen.ended:
                seen.victim_seconds = seen.ended[trial.victim].at - max(struck, self._released_at)

    def _deadline(self) -> float:
        """Till when ranks are watched; those that a victim's end is to follow may take the whole limit after it."""
        struck = self._seen.struck
        since = struck.at if struck is not None else self._started_at + 20.0
        return max(since, self._released_at) + self._seen.limit_s + _WATCH_S

    def _take(self, pipe: Any) -> None:
        seen, rank = self._seen, self._waiting[pipe]
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._waiting[pipe]
            self._members[rank].process.join(5)
            if rank == self._trial.victim and self._trial.kind is Kind.KILLED:
                seen.killed = True
            else:
                seen.hung[rank] = f"its process died with exit code {self._members[rank].process.exitcode}"
            return
        if isinstance(message, Ended):
            seen.ended[rank] = message
            del self._waiting[pipe]
        elif isinstance(message, Struck):
            seen.struck = message
            self._frozen = self._trial.kind in (Kind.FROZEN, Kind.PAUSED)
            if self._trial.kind is Kind.PAUSED:
                self._due = message.at + self._trial.way * self._trial.timeout_s
        elif isinstance(message, Part) and message.part == self._trial.place[0]:
            # As long as a rank takes for it, or as another one makes it wait.
            most = 0.4 if self._trial.slow >= 0 else 0.06
            self._due = time.monotonic() + most * self._trial.fraction

    def _act(self) -> None:
        self._due = float("inf")
        victim = self._members[self._trial.victim]
        if self._frozen:
            self._frozen = False
            self._released_at = time.monotonic()
            victim.signal(signal.SIGCONT)
        elif self._trial.kind is Kind.SIGNALLED and self._seen.struck is None:
            self._seen.struck = Struck(time.monotonic(), "by a signal")
            victim.signal(signal.SIGINT)

    def _give_up(self) -> None:
        for rank in self._waiting.values():
            self._members[rank].signal(signal.SIGCONT)
            self._seen.hung[rank] = self._members[rank].stack()


def run_trials(
    seed: int,
    count: int,
    crews: int,
    chosen: Callable[[Trial], bool] = lambda trial: True,
    done: Callable[[Result], None] = lambda result: None,
    *,
    delta: bool = False,
) -> list[Result]:
    """What came of the chosen ones of ``count`` trials, ``crews`` at a time, since most of them wait.

    ``done`` is told of each as it ends, from threads.
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

        counted = pool.map(lambda world: with_a_crew(lambda crew: crew.count(world, delta)), WORLDS)
        counts = dict(zip(WORLDS, counted, strict=True))

        def run(trial: Trial) -> Result:
            seen = with_a_crew(lambda crew: crew.run(trial, counts))
            result = seen, judge(seen)
            done(result)
            return result

        return list(pool.map(run, filter(chosen, draw(seed, count, counts, delta=delta))))
