import math

import pytest
import torch

from rlrefit.recipes.algorithms.advantages import group_advantages


def test_an_advantage_is_the_distance_to_the_groups_mean_in_sample_standard_deviations():
    # Group 0: 1, 0, 0, 0 has mean 1/4 and variance (9/16 + 3/16) / 3 = 1/4, so deviation 1/2.
    # Group 1: 1, 1, 0, 0 has mean 1/2 and variance (4/4) / 3 = 1/3.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    got = group_advantages(rewards, 4, eps=0.0)
    second = 0.5 / math.sqrt(1 / 3)
    assert torch.allclose(got, torch.tensor([1.5, -0.5, -0.5, -0.5, second, second, -second, -second]))
    # 2 and 0: mean 1, deviation sqrt(2); with eps = sqrt(2) the quotient is 1 / (2 * sqrt(2)).
    got = group_advantages(torch.tensor([2.0, 0.0]), 2, eps=math.sqrt(2))
    assert got[0].item() == pytest.approx(1 / (2 * math.sqrt(2)))
    got = group_advantages(torch.tensor([3.0, 1.0, 10.0, 20.0]), 2, normalize_std=False)
    assert got.tolist() == [1.0, -1.0, -5.0, 5.0]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [3, 7])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward, size):
    rewards = torch.cat([torch.full((size,), reward), torch.arange(size).float()])
    got = group_advantages(rewards, size, eps=1e-12)
    assert got[:size].tolist() == [0.0] * size
    assert got[size:].std() == pytest.approx(1.0)


def test_rewards_that_are_whole_numbers_or_booleans_become_float32():
    for rewards in ([1, 2], [True, False]):
        assert group_advantages(torch.tensor(rewards), 2).dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "size", "told"),
    [
        (torch.tensor([0.0, 1.0, 0.0, math.nan]), 2, r"reward 3 \(member 1 of group 1\)"),
        (torch.tensor([0.0, 1.0, 0.0, math.inf]), 2, r"reward 3 \(member 1 of group 1\)"),
        (torch.zeros(5), 2, "whole groups"),
        (torch.zeros(2, 2), 2, "whole groups"),
        (torch.zeros(4), 1, "at least 2"),
    ],
)
def test_rewards_that_are_not_finite_or_no_whole_groups_are_refused(rewards, size, told):
    with pytest.raises(ValueError, match=told):
        group_advantages(rewards, size)
