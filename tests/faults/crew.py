"""Runs trials: processes for the ranks, signals to the victim, and the next epoch, in which all must heal."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.servers import processes

from .moments import Place
from .rank import Ended, Order, Part, Struck, work
from .trials import HEALED, STEPPED, VERSIONS, Counts, Kind, Trial, World

# Beyond the limit: what a rank waits for a rendezvous that does not answer (half the limit, from 1 to 5 s), its
# farewell to it, and a busy machine.
GRACE_S = 8.0
# For how long a rank that hangs is still watched: how late it is belongs into the table.
_WATCH_S = 20.0
_HEALING_S = 30.0
_ATTEMPTS = 4


@dataclass
class Observed:
    """All that a trial has shown.

    Attributes:
        trial: as it was run in the end: with a longer limit if the machine was too slow for the first one.
        struck: the fault, or None if it never came to be.
        ended: the ranks that ended by themselves, the victim among them if it lived.
        hung: ranks that did not, with their stacks.
        killed: whether the victim's process was ended by the fault.
        healed: the ranks in the next epoch.
        heal_hung: ranks that did not end there.
        seconds: from the fault to the end of the slowest rank but the victim.
        victim_seconds: the same for the victim, from when it could go on.
    """

    trial: Trial
    struck: Struck | None = None
    ended: dict[int, Ended] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)
    killed: bool = False
    healed: dict[int, Ended] = field(default_factory=dict)
    heal_hung: list[int] = field(default_factory=list)
    seconds: float = 0.0
    victim_seconds: float = 0.0

    @property
    def limit_s(self) -> float:
        """What is taken as a hang."""
        return self.trial.timeout_s + GRACE_S


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

    def count(self, world: World) -> Sequence[Mapping[Place, int]]:
        """Points of the library that each rank of a world passes without any fault, by part and window."""
        ended = self._epoch(world, VERSIONS, 60.0, "sampled", 0, counts=True)
        failed = [e for e in ended.values() if e.error]
        assert len(ended) == sum(world), f"only ranks {sorted(ended)} of {world} ended without any fault"
        assert not failed, f"without any fault: {failed}"
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
        self._staff(trial.size)
        rendezvous = self._host(trial.world, 0)
        at = 0
        if trial.kind in STEPPED:
            at = int(trial.fraction * counts[trial.world][trial.victim][trial.place])
        for rank in range(trial.size):
            order = Order(rendezvous, trial.world, rank, VERSIONS, trial.timeout_s, trial.verify)
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

    def _heal(self, seen: Observed) -> None:
        """The survivors with what they hold, and fresh processes for those that died or hung, meet anew."""
        trial = seen.trial
        # A victim whose model was changed is started anew with the right one.
        fresh = {*seen.hung} | (
            {trial.victim} if seen.killed or (seen.struck and seen.struck.weight) else set()
        )
        seen.healed = self._epoch(trial.world, (HEALED,), _HEALING_S, trial.verify, 1, fresh=fresh)
        seen.heal_hung = sorted(set(range(trial.size)) - set(seen.healed))
        for rank in seen.heal_hung:
            self._replace(rank)

    def _epoch(
        self,
        world: World,
        versions: tuple[int, ...],
        timeout_s: float,
        verify: str,
        epoch: int,
        *,
        fresh: set[int] | None = None,
        counts: bool = False,
    ) -> dict[int, Ended]:
        """An epoch without faults."""
        size = sum(world)
        self._staff(size)
        rendezvous = self._host(world, epoch)
        for rank in range(size):
            anew = fresh is None or rank in fresh
            order = Order(rendezvous, world, rank, versions, timeout_s, verify, counts=counts, fresh=anew)
            self._members[rank].pipe.send(order)
        waiting = {self._members[rank].pipe: rank for rank in range(size)}
        ended: dict[int, Ended] = {}
        deadline = time.monotonic() + timeout_s + GRACE_S + _WATCH_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    ended[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    continue  # it died
        return ended

    def _host(self, world: World, epoch: int) -> Any:
        pipe = self._members[0].pipe
        pipe.send((*world, epoch))
        return pipe.recv()

    def _staff(self, size: int) -> None:
        while len(self._members) < size:
            self._members.append(self._make())

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
        return trial, {
            **counts,
            trial.world: [{**of, trial.place: passed} for of in counts[trial.world]],
        }
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
            others = [e.at for rank, e in seen.ended.items() if rank != trial.victim]
            seen.seconds = max([at - struck for at in others] + [0.0])
            if trial.victim in seen.ended:
                seen.victim_seconds = seen.ended[trial.victim].at - max(struck, self._released_at)

    def _deadline(self) -> float:
        """Till when ranks are watched; those that a victim's end is to follow may take the whole limit after it."""
        since = max(
            self._seen.struck.at if self._seen.struck is not None else self._started_at + 20.0,
            self._released_at,
        )
        return since + self._seen.limit_s + _WATCH_S

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
