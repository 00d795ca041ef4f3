"""What all cases found, from as few starts of ranks as it takes: one, if none of them fails."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ahead import lasting
from tests.spawn import PATIENT_S, RankFailed, run_ranks

from .cases import BROKEN, CHANGED, CONVERSIONS, COPIED, COVERING, FEW_GROUPS, INT4, REST, WORLD, Case
from .checkpoints import write_checkpoint
from .ranks import MAPPINGS, walk

# Of all cases together, however many of them fail or hang.
_WALK_S, LONG_WALK_S = PATIENT_S, 850.0


class Report:
    """Findings by case.

    Args:
        found: by the case's text.
        failed: why a case has none.
    """

    def __init__(self, found: dict[str, dict[str, Any]], failed: dict[str, str]):
        self._found = found
        self._failed = failed

    def __or__(self, other: Report) -> Report:
        return Report(self._found | other._found, self._failed | other._failed)

    def of(self, case: Case) -> dict[str, Any]:
        """What :func:`.ranks.walk` wrote of a case.

        Raises:
            AssertionError: the case failed; with the failing rank's traceback.
        """
        assert str(case) not in self._failed, self._failed[str(case)]
        return self._found[str(case)]


def examine(cases: Sequence[Case], folder: Path, within_s: float = _WALK_S) -> Report:
    """Walk through all cases; after one that fails, the others go on in new processes."""
    wanted = dict.fromkeys(case.checkpoint for case in cases if case.family != MAPPINGS)
    checkpoints = {
        (family, short): write_checkpoint(
            family, folder / f"{family}{'-short' if short else ''}", short=short
        )
        for family, short in wanted
    }
    failed: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    left = sorted(cases, key=lambda case: case.layout.groups)
    deadline = time.monotonic() + within_s
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            failed.update((str(case), f"the walk took longer than {within_s:.0f} s") for case in left)
            break
        try:
            run_ranks(walk, WORLD, left, checkpoints, str(folder), timeout_s=remaining)
        except RankFailed as failure:
            reason = str(failure)
        else:
            reason = "it wrote nothing"
        for case in left:
            file = folder / f"{case}.json"
            if file.exists():
                found[str(case)] = json.loads(file.read_text())
        left = [case for case in left if str(case) not in found]
        if left:
            failed[str(left.pop(0))] = reason
    return Report(found, failed)


def examine_covering(folder: Path) -> Report:
    """What the tests of each change ask of."""
    return examine([*CONVERSIONS, COPIED, FEW_GROUPS, *CHANGED, BROKEN, *INT4, *COVERING], folder)


@lasting(LONG_WALK_S + 50.0)
def examine_rest(folder: Path) -> Report:
    """All other layouts."""
    return examine(REST, folder, LONG_WALK_S)
