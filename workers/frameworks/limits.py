"""How long a framework's driver waits for workers that can't say anything any more."""

from __future__ import annotations

_WAITS, _GRACE_S = 2.0, 30.0


def call_limit_s(timeout_s: float) -> float:
    """Seconds for a call to a worker.

    A refit is several waits in a row, each of which may take its own timeout and then names its rank and stage; the driver
    gives up after all of them.

    Args:
        timeout_s: seconds that a wait of a refit may take.
    """
    return timeout_s * _WAITS + _GRACE_S
