"""All violations of a configuration in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong.

    Attributes:
        keys: dotted keys that it follows from; empty if it concerns no key (a file that is not there).
        text: what is wrong, the consequence and the remedy, beginning with the key to change.
    """

    keys: tuple[str, ...]
    text: str


class ConfigError(ValueError):
    """A recipe that cannot run; the text lists every violation.

    Attributes:
        recipe: the recipe as it was asked for.
        violations: the texts, one for each violation.
    """

    def __init__(self, recipe: str, violations: Sequence[str]) -> None:
        count = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
        lines = [f"  {number}. {text}" for number, text in enumerate(violations, start=1)]
        super().__init__("\n".join([f"recipe {recipe}: {count}; nothing was started", *lines]))
        self.recipe = recipe
        self.violations = tuple(violations)
