"""Which refits are sparse: all ranks come to the same answer, from what each of them wishes."""

from __future__ import annotations

from typing import NamedTuple

# What a rank wishes of a refit, as flags of its meeting: a dense one, and none but dense ones for a while, since sparse ones
# have been slower.
DENSE, PAUSE = 2, 4
# Refits that such a while lasts at first; each one lasts twice as long as the one before, up to the last number.
_PAUSE, _LONGEST_PAUSE = 8, 512


class Kind(NamedTuple):
    """Of a refit: sparse, or dense, and whether a dense one leaves a base."""

    sparse: bool
    takes_base: bool


class Choice:
    """Decides between dense and sparse, refit by refit.

    Args:
        mode: ``auto`` or ``always``.
    """

    def __init__(self, mode: str):
        self._mode = mode
        self._base: int | None = None
        self._kind = Kind(sparse=False, takes_base=False)
        self._refits = self._resume_at = 0
        self._paused = False
        self._pause = _PAUSE
        self._dense_s = self._sparse_s = float("nan")

    @property
    def may_be_sparse(self) -> bool:
        """Whether the next refit may be; the same on all ranks that took part in the last one."""
        return self._base is not None

    def trainer_wishes(self) -> int:
        """Flags of a trainer rank."""
        slower = self._mode == "auto" and self._sparse_s > self._dense_s
        return (0 if self._base is not None else DENSE) | (PAUSE if slower else 0)

    def engine_wishes(self, held: int | None) -> int:
        """Flags of an engine rank that holds version ``held``; None if it may hold anything."""
        return 0 if held is not None and held == self._base else DENSE

    def wishes_of_lost(self) -> int:
        """Flags of an engine rank whose weights are lost. It may lose them between any two refits, and would need no base then."""
        return DENSE | (PAUSE if self._mode == "auto" else 0)

    def decide(self, flags: int) -> Kind:
        """The next refit, from the flags of all ranks together; begins it."""
        self._pause_if(flags, self._refits)
        sparse = not self._paused and not flags & (DENSE | PAUSE) and self._base is not None
        # The first refit of an epoch takes longer than later ones, and is no measure of a dense refit.
        measured = self._mode == "always" or self._refits > 0
        self._kind = Kind(sparse, takes_base=measured and not sparse and not self._paused)
        self._refits += 1
        self._base = None
        return self._kind

    def again(self, flags: int = 0) -> Kind:
        """The refit that has begun has to be dense, or is done once more, since weights had moved; ``flags`` as in :meth:`decide`."""
        self._pause_if(flags, self._refits - 1)
        self._kind = Kind(sparse=False, takes_base=not self._paused)
        return self._kind

    def took(self, seconds: float) -> None:
        """What the refit under way took on this rank, without what taking a base takes."""
        if self._kind.sparse:
            self._sparse_s = seconds
        else:
            self._dense_s = seconds

    def commit(self, version: int) -> None:
        """All ranks hold ``version``."""
        self._base = version if self._kind.sparse or self._kind.takes_base else None

    def _pause_if(self, flags: int, refit: int) -> None:
        # Once in a refit, which may hear of it twice.
        if flags & PAUSE and refit >= self._resume_at:
            self._resume_at = refit + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._sparse_s = float("nan")
        self._paused = refit < self._resume_at
