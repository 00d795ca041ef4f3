"""The names by which the weights of a drafter that is trained beside the policy travel with the policy's.

A drafter of a checkpoint of its own (EAGLE) has names that the policy has too: ``norm.weight``, ``lm_head.weight``. So each of its
names has a prefix that no checkpoint has. It is the one that tells a drafter's parameters in ``refit_parameter_digests``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

DRAFTER: Final = "drafter."


def of_drafter(name: str) -> bool:
    """Whether a weight of a refit is the trained drafter's."""
    return name.startswith(DRAFTER)


def without_drafter[Named: tuple[Any, ...]](named: Iterable[Named]) -> Iterator[Named]:
    """Those of ``named``, which begin with a name, that are not the trained drafter's."""
    return (one for one in named if not of_drafter(one[0]))
