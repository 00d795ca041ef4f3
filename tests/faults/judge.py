"""What has to hold after a fault, and what did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .crew import Observed
from .rank import Ended, Raised
from .trials import CHANGES, FLIPS, HEALED, INTERRUPTS

# Of all errors that name the cause.
ENOUGH = 0.95


@dataclass
class Verdict:
    """Of one trial.

    Attributes:
        errors: of the ranks that the fault did not hit.
        typed: those that are a refit's.
        named: those that name the cause: the rank, and the weight where one was changed.
        hangs: ranks that did not end within the limit.
        corrupt: clean engines with other bytes than those of the version that they claim, or of two versions.
        escapes: engines with bytes that were changed in a message which ``sampled`` did not check.
        unguarded: clean engines into which a sender may have written already.
        healed: whether the next epoch brought all engines to one version, whole.
        faults: all that is wrong, for a person.
    """

    errors: int = 0
    typed: int = 0
    named: int = 0
    hangs: int = 0
    corrupt: int = 0
    escapes: int = 0
    unguarded: int = 0
    healed: bool = True
    faults: list[str] = field(default_factory=list)


def judge(seen: Observed) -> Verdict:
    """Hold what a trial has shown against what has to hold."""
    found = Verdict()
    _hangs(seen, found)
    _engines(seen, found)
    _errors(seen, found)
    _healing(seen, found)
    return found


def holds(verdicts: Sequence[Verdict]) -> bool:
    """Whether the library does what it says under all these faults."""
    errors = sum(v.errors for v in verdicts)
    return (
        not any(v.corrupt or v.unguarded or v.hangs for v in verdicts)
        and all(v.healed for v in verdicts)
        and sum(v.typed for v in verdicts) == errors
        and sum(v.named for v in verdicts) >= ENOUGH * errors
    )


def _hangs(seen: Observed, found: Verdict) -> None:
    for rank, stack in seen.hung.items():
        found.hangs += 1
        found.faults.append(f"rank {rank} hung:\n{stack}")
    late = seen.seconds > seen.limit_s
    if late:
        found.hangs += 1
        found.faults.append(f"the slowest rank took {seen.seconds:.1f} s at a limit of {seen.limit_s:.1f}")
    if seen.victim_seconds > seen.limit_s:
        found.hangs += 1
        found.faults.append(f"the victim took {seen.victim_seconds:.1f} s at a limit of {seen.limit_s:.1f}")


def _engines(seen: Observed, found: Verdict) -> None:
    trial = seen.trial
    escaped = seen.struck is not None and seen.struck.flipped is not None and not seen.struck.flipped.due
    escaped = escaped and trial.verify == "sampled"
    serving: dict[int, int] = {}
    for rank, ended in seen.ended.items():
        if ended.clean is None:
            continue
        wrong = [f"{v}: {names}" for v, names in ended.wrong.items()]
        if ended.clean and ended.left_wrong:
            wrong.append(f"in the end {ended.version}: {ended.left_wrong}")
        if wrong and escaped:
            found.escapes += 1
        elif wrong:
            found.corrupt += 1
            found.faults.append(f"rank {rank} is clean and wrong, by version: {'; '.join(wrong)}")
        if ended.clean:
            serving[rank] = ended.version
            begun = {v for other in seen.ended.values() for v in other.sent if v > ended.version}
            if begun:
                found.unguarded += 1
                found.faults.append(
                    f"rank {rank} is clean with version {ended.version}, and trainers began to send {sorted(begun)}"
                )
    if len({*serving.values()}) > 1:
        found.corrupt += 1
        found.faults.append(f"engines serve different versions, by rank: {serving}")


def _errors(seen: Observed, found: Verdict) -> None:
    trial, struck = seen.trial, seen.struck
    if struck is None:
        return
    to_blame = {trial.victim}
    if trial.kind in FLIPS and struck.flipped is not None:
        to_blame |= {*struck.flipped.ends}
        # Which end changed them, or a rank that passed them on, nobody can tell.
        to_blame |= {
            rank
            for rank, e in seen.ended.items()
            if e.error is not None and e.error.kind == "VerificationError"
        }
    for rank, ended in sorted(seen.ended.items()):
        error = ended.error
        if error is None:
            continue
        if rank == trial.victim:
            _of_victim(seen, ended, error, found)
            continue
        found.errors += 1
        found.typed += error.is_refit_error
        if not error.is_refit_error:
            found.faults.append(f"rank {rank} raised {error.kind}: {error.text}")
        # Which end changed them the rank that finds it can't tell.
        finds_it = error.kind == "VerificationError" and trial.kind in FLIPS
        blames = finds_it or error.blamed in to_blame
        if error.rank not in (-1, rank):
            blames = False
            found.faults.append(f"the error of rank {rank} says that it is rank {error.rank}'s")
        if error.is_refit_error and blames and _names_weight(seen, error):
            found.named += 1
        else:
            found.faults.append(f"rank {rank} blames {error.blamed}: {error.kind}: {error.text}")


def _of_victim(seen: Observed, ended: Ended, error: Raised, found: Verdict) -> None:
    trial = seen.trial
    own = error.injected or (trial.kind in INTERRUPTS and error.kind == "KeyboardInterrupt")
    if not error.is_refit_error and not own:
        found.errors += 1
        found.faults.append(f"the victim raised {error.kind}: {error.text}")
    elif trial.kind in CHANGES:
        found.errors += 1
        found.typed += 1
        if seen.struck is not None and error.parameter == seen.struck.weight:
            found.named += 1
        else:
            found.faults.append(f"the victim names weight {error.parameter!r}: {error.kind}: {error.text}")


def _names_weight(seen: Observed, error: Raised) -> bool:
    struck = seen.struck
    if struck is None:
        return False
    if seen.trial.kind in CHANGES:
        return struck.weight == error.parameter or struck.weight in error.text
    if struck.flipped is not None:
        return any(name == error.parameter or name in error.text for name in struck.flipped.weights)
    return True


def _healing(seen: Observed, found: Verdict) -> None:
    wrong: list[str] = [f"rank {rank} hung" for rank in seen.heal_hung]
    for rank, ended in sorted(seen.healed.items()):
        if ended.error is not None:
            wrong.append(f"rank {rank} raised {ended.error.kind}: {ended.error.text}")
        if ended.clean is not None and (not ended.clean or ended.version != HEALED or ended.left_wrong):
            wrong.append(
                f"rank {rank} clean {ended.clean}, version {ended.version}, wrong {ended.left_wrong}"
            )
    if wrong:
        found.healed = False
        found.faults.append(f"not healed: {'; '.join(wrong)}")
