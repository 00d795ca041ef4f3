"""A served model and its drafter as one destination: which of its work the served model does while weights are on their way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from rlrefit.integration.layout import Fragment
from rlrefit.integration.weights.endpoints import working_on_portions
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.drafted import DraftedDestination

SPECS = [TensorSpec(name, (2,), torch.float32) for name in ("embed", "layer", "mtp")]


class _Model:
    """A model that holds whole weights."""

    def __init__(self, *names: str) -> None:
        self.held = {name: torch.zeros(2) for name in names}

    def fragments(self, specs: Iterable[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        boxes = {name: tuple((0, size) for size in shape) for name, shape, _ in specs if name in self.held}
        return [Fragment(name, (2,), box, self.held[name]) for name, box in boxes.items()], {}

    def finish(self, version: int) -> None:
        pass


class _Packed(_Model):
    """One that doubles its layer's weight once, as early as it can."""

    works_on_portions = True

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self._portions: Mapping[str, int] = {}
        self._doubled = False

    def expect(self, portions: Mapping[str, int]) -> None:
        self._portions = portions

    def landed(self, portion: int) -> None:
        if self._portions["layer"] == portion:
            self.held["layer"] *= 2
            self._doubled = True

    def finish(self, version: int) -> None:
        if not self._doubled:
            self.held["layer"] *= 2
        self._doubled = False


def _drafted(served: Any, drafter: Any) -> Any:
    return DraftedDestination(served, drafter, lambda names: (n for n in names if n == "mtp"), print)


def _refit(destination: Any, models: tuple[_Model, _Model], version: int) -> list[list[float]]:
    """From poisoned memory, of weights of so many, the drafter's own one last; what the served layer holds after each portion."""
    for model in models:
        for held in model.held.values():
            held.fill_(torch.nan)
    fragments, _ = destination.fragments(SPECS)
    works, seen = working_on_portions(destination), []
    if works is not None:
        works.expect({"embed": 0, "layer": 0, "mtp": 1})
    for portion in (0, 1):
        for fragment in fragments:
            if (fragment.name == "mtp") == portion:
                fragment.view.fill_(version)
        if works is not None:
            works.landed(portion)
        seen.append(models[0].held["layer"].tolist())
    destination.finish(version)
    return seen


def test_the_served_model_works_on_portions_while_the_drafters_weights_are_on_their_way():
    served, drafter = _Packed("embed", "layer"), _Model("mtp")
    destination = _drafted(served, drafter)
    for version in (1, 2):
        assert _refit(destination, (served, drafter), version) == [[2 * version] * 2] * 2
        assert served.held["layer"].tolist() == [2 * version] * 2
        assert drafter.held["mtp"].tolist() == [version] * 2


@pytest.mark.parametrize("copied", ["embed", "layer"])
def test_what_the_drafter_copies_of_the_model_is_copied_as_it_landed(copied):
    served, drafter = _Packed("embed", "layer"), _Model("mtp", copied)
    destination = _drafted(served, drafter)
    for version in (1, 2):
        _refit(destination, (served, drafter), version)
        assert served.held["layer"].tolist() == [2 * version] * 2
        assert drafter.held[copied].tolist() == [version] * 2


def test_a_served_model_without_such_work_has_none_with_a_drafter():
    assert working_on_portions(_drafted(_Model("layer"), _Model("mtp"))) is None
