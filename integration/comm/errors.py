"""What a backend's errors mean to a refit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PeerLost, RefitError, RefitTimeout


def classified(error: RuntimeError, stage: str, rank: int, what: str) -> RefitError:
    """What a backend's error means to a refit."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return RefitTimeout(f"the exchange {what} did not end in time: {text}", stage=stage, rank=rank)
    return PeerLost(f"the exchange {what} broke: {text}", stage=stage, rank=rank)


@contextmanager
def classifying(stage: str, rank: int, what: str) -> Iterator[None]:
    """Raise a backend's errors inside as a refit's; ``what`` says of which exchange."""
    try:
        yield
    except RefitError:
        raise
    except RuntimeError as error:
        raise classified(error, stage, rank, what) from error
