"""Learning rates over the steps of a run, and the penalty for completions that are too long."""

from __future__ import annotations

import pytest
import torch

from rlrefit.recipes.algorithms.rates import LR_DECAYS, learning_rate
from rlrefit.recipes.algorithms.shaping import overlong_penalty


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


def test_the_overlong_penalty_grows_linearly_over_the_buffer() -> None:
    # max_length 10, buffer 4: free up to 6, then (6 - length) / 4, and -1 from 10 on.
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10, 11, 500])
    got = overlong_penalty(lengths, max_length=10, buffer=4)
    assert got.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4).tolist() == [0.0, -0.25, -1.0]
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, 10, buffer)
