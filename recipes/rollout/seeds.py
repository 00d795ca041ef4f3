"""Seeds of engines and of requests, all made of the recipe's."""

from __future__ import annotations


def engine_seed(seed: int, replica: int) -> int:
    """A seed of its own for each replica, or equal prompts would get equal completions.

    Args:
        seed: the recipe's.
        replica: the engine's number.
    """
    return (seed * 1_000_003 + replica) % (1 << 31)


def request_seed(seed: int, index: int) -> int:
    """A seed of its own for each request: the result does not depend on what an engine batches it with.

    Args:
        seed: of the call to the engine.
        index: of the request among those of the call.
    """
    return seed * 1_000_003 + index
