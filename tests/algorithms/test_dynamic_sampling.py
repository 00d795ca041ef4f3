import pytest

from rlrefit.recipes.algorithms.dynamic_sampling import DynamicSampler, DynamicSamplingStats

MIXED, ZEROS, ONES = [0.0, 1.0], [0.1, 0.1], [1.0, 1.0]


@pytest.mark.parametrize(
    ("target", "rounds", "offers", "expected", "stats"),
    [
        (3, 5, {"abc": [MIXED, ZEROS, ONES], "def": [MIXED] * 3}, "ade", (2, 6, 2, 1, 0, 0)),
        # The rounds run out, and uniform groups fill the batch.
        (3, 2, {"ab": [ZEROS, MIXED], "cd": [ONES, ZEROS]}, "bac", (2, 4, 3, 0, 2, 0)),
        # Nothing was offered for two places, which stay empty.
        (4, 1, {"ab": [ZEROS, MIXED]}, "ba", (1, 2, 1, 0, 1, 2)),
        # However close, rewards that differ have a signal.
        (1, 3, {"a": [[0.1, 0.1]], "b": [[0.1, 0.10001]]}, "b", (2, 2, 1, 0, 0, 0)),
    ],
)
def test_groups_with_a_signal_fill_the_batch_then_uniform_ones_and_the_stats_say_so(
    target, rounds, offers, expected, stats
):
    sampler = DynamicSampler(target, rounds)
    for groups, rewards in offers.items():
        assert not sampler.done
        sampler.offer([*groups], rewards)
    assert sampler.done
    batch, told = sampler.batch()
    assert batch == [*expected]
    assert told == DynamicSamplingStats(*stats)


def test_calls_at_the_wrong_time_and_groups_without_rewards_are_refused():
    sampler = DynamicSampler(target=2, max_rounds=2)
    with pytest.raises(ValueError, match="2 groups came with rewards of 1"):
        sampler.offer(["a", "b"], [MIXED])
    with pytest.raises(ValueError, match="group 1 of the round has no rewards"):
        sampler.offer(["a", "b"], [MIXED, []])
    sampler.offer(["a"], [MIXED])
    assert sampler.missing == 1
    with pytest.raises(RuntimeError, match="still wants 1 of 2 groups"):
        sampler.batch()
    sampler.offer(["b"], [MIXED])
    with pytest.raises(RuntimeError, match="done"):
        sampler.offer(["c"], [MIXED])
    for target, rounds in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="can't fill a batch"):
            DynamicSampler(target, rounds)
