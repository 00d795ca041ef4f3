"""The names by which the weights of a drafter that is trained beside the policy travel with the policy's.

A drafter of a checkpoint of its own (EAGLE) has names that the policy has too: ``norm.weight``, ``lm_head.weight``. So each of its
names has a prefix that no checkpoint has. It is the one that tells a drafter's parameters in ``refit_parameter_digests``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ..integration.layout import Fragment

DRAFTER: Final = "drafter."


def of_drafter(name: str) -> bool:
    """Whether a weight of a refit is the trained drafter's."""
    return name.startswith(DRAFTER)


def without_drafter[Named: tuple[Any, ...]](named: Iterable[Named]) -> Iterator[Named]:
    """Those of ``named``, which begin with a name, that are not the trained drafter's."""
    return (one for one in named if not of_drafter(one[0]))


def prefixed[Value](by_name: Mapping[str, Value]) -> dict[str, Value]:
    """What is told of a drafter's weights by the names of its checkpoint, by those in the refit."""
    return {DRAFTER + name: value for name, value in by_name.items()}


def prefixed_fragments(fragments: Iterable[Fragment]) -> list[Fragment]:
    """The same of the parts that a rank holds."""
    return [replace(fragment, name=DRAFTER + fragment.name) for fragment in fragments]
