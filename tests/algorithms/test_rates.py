"""Learning rates over the steps of a run."""

from __future__ import annotations

import pytest

from rlrefit.recipes.algorithms.rates import LR_DECAYS, learning_rate


@pytest.mark.parametrize("decay", LR_DECAYS)
def test_a_rate_rises_to_its_height_and_falls_no_lower_than_its_end(decay: str) -> None:
    rates = [
        learning_rate(step, 1.0, warmup_steps=3, decay=decay, decay_steps=13, min_lr=0.2)
        for step in range(16)
    ]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    if decay == "constant":
        assert set(rates[3:]) == {1.0}
    else:
        assert rates[8] == pytest.approx(0.6)  # half of the way
        assert rates[3:14] == sorted(rates[3:14], reverse=True)
        assert rates[13:] == pytest.approx([0.2, 0.2, 0.2])


def test_a_rate_without_a_warm_up_begins_at_its_height() -> None:
    assert learning_rate(0, 2.0, warmup_steps=0, decay="linear", decay_steps=4, min_lr=0.0) == 2.0
    assert learning_rate(4, 2.0, warmup_steps=0, decay="linear", decay_steps=4, min_lr=0.0) == 0.0
