"""What has to hold after a fault, and what did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .rank import Ended, Observed, Raised
from .trials import (
    BASES,
    BEHIND,
    CHANGES,
    FLIPS,
    INTERRUPTS,
    NOT_LOOKED_AT,
    ON_THE_WIRE,
    UNSURE,
    VERSIONS,
    Trial,
    healing,
)

# Kinds of which sums tell.
_SUMMED = FLIPS | ON_THE_WIRE | BASES | BEHIND

# Of all errors that name the cause.
ENOUGH = 0.95


@dataclass
class Verdict:
    """Of one trial."""

    errors: int = 0  # of the ranks that the fault did not hit
    typed: int = 0  # those that are a refit's
    named: int = 0  # those that name the cause: the rank, and the weight where one was changed
    hangs: int = 0  # ranks that did not end within the limit
    corrupt: int = (
        0  # clean engines with other bytes than those of the version that they claim, or of two versions
    )
    escapes: int = 0  # engines with bytes that were changed where nothing is checked, as the pages say
    unguarded: int = 0  # clean engines into which a sender may have written already
    healed: bool = True  # the next epoch brought all engines to one version, whole
    faults: list[str] = field(default_factory=list)  # all that is wrong, for a person


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
    faults = [f"rank {rank} hung:\n{stack}" for rank, stack in seen.hung.items()]
    for who, seconds in (("the slowest rank", seen.seconds), ("the victim", seen.victim_seconds)):
        if seconds > seen.limit_s:
            faults.append(f"{who} took {seconds:.1f} s at a limit of {seen.limit_s:.1f}")
    found.hangs += len(faults)
    found.faults += faults


def _engines(seen: Observed, found: Verdict) -> None:
    flipped = seen.struck.flipped if seen.struck is not None else None
    unchecked = seen.trial.verify == "sampled" or seen.trial.kind in NOT_LOOKED_AT
    escaped = flipped is not None and not flipped.due and unchecked
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
                    f"rank {rank} is clean at {ended.version}, and trainers send {sorted(begun)}"
                )
        if seen.trial.kind in UNSURE and ended.sparse.get(VERSIONS[seen.trial.place[0] - 1]):
            found.corrupt += 1
            found.faults.append(f"rank {rank} took a sparse refit, whatever an engine held")
    if len({*serving.values()}) > 1:
        found.corrupt += 1
        found.faults.append(f"engines serve different versions, by rank: {serving}")


def _errors(seen: Observed, found: Verdict) -> None:
    trial, struck = seen.trial, seen.struck
    if struck is None:
        return
    errors = {rank: ended.error for rank, ended in sorted(seen.ended.items()) if ended.error is not None}
    to_blame = {trial.victim}
    if trial.kind in _SUMMED and struck.flipped is not None:
        # Which end changed them, or a rank that passed them on, nobody can tell.
        to_blame |= {*struck.flipped.ends}
        to_blame |= {rank for rank, error in errors.items() if error.kind == "VerificationError"}
    for rank, error in errors.items():
        if rank == trial.victim:
            _of_victim(seen, error, found)
            continue
        found.errors += 1
        found.typed += error.is_refit_error
        finds_it = error.kind == "VerificationError" and trial.kind in _SUMMED
        blames = (finds_it or error.blamed in to_blame) and error.rank in (-1, rank)
        if error.is_refit_error and blames and _names_weight(seen, error):
            found.named += 1
        else:
            found.faults.append(
                f"rank {rank} (says {error.rank}) blames {error.blamed}: {error.kind}: {error.text}"
            )


def _of_victim(seen: Observed, error: Raised, found: Verdict) -> None:
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
    assert struck is not None
    names: tuple[str, ...] = (struck.weight,) if seen.trial.kind in CHANGES else ("",)
    if struck.flipped is not None:
        names = struck.flipped.weights
    return any(name == error.parameter or name in error.text for name in names)


def _healing(seen: Observed, found: Verdict) -> None:
    wrong: list[str] = [f"rank {rank} hung" for rank in seen.heal_hung]
    for rank, ended in sorted(seen.healed.items()):
        if ended.error is not None:
            wrong.append(f"rank {rank} raised {ended.error.kind}: {ended.error.text}")
        if ended.clean is not None and not _is_healed(ended, seen.trial):
            wrong.append(
                f"rank {rank} clean {ended.clean}, at {ended.version}, wrong {ended.wrong or ended.left_wrong}, sparse {ended.sparse}"
            )
    if wrong:
        found.healed = False
        found.faults.append(f"not healed: {'; '.join(wrong)}")


def _is_healed(ended: Ended, trial: Trial) -> bool:
    versions = healing(trial)
    right = bool(ended.clean) and ended.version == versions[-1] and not ended.wrong and not ended.left_wrong
    return right and ended.sparse == {version: version > versions[0] for version in versions}
