import pytest

from rlrefit.recipes.algorithms.dynamic_sampling import DynamicSampler, DynamicSamplingStats

MIXED, ZEROS, ONES = [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]


def test_rounds_go_on_until_the_batch_is_full_of_groups_with_a_signal():
    sampler = DynamicSampler(target=3, max_rounds=5)
    sampler.offer(["a", "b", "c"], [MIXED, ZEROS, ONES])
    assert not sampler.done
    assert sampler.missing == 2
    sampler.offer(["d", "e", "f"], [MIXED, MIXED, MIXED])
    assert sampler.done
    assert sampler.missing == 0
    groups, stats = sampler.batch()
    assert groups == ["a", "d", "e"]
    assert stats == DynamicSamplingStats(rounds=2, sampled=6, uniform=2, surplus=1, filled=0, missing=0)


def test_when_the_rounds_run_out_uniform_groups_fill_the_batch_and_the_stats_say_so():
    sampler = DynamicSampler(target=3, max_rounds=2)
    sampler.offer(["a", "b"], [ZEROS, MIXED])
    sampler.offer(["c", "d"], [ONES, ZEROS])
    assert sampler.done
    assert sampler.missing == 2
    groups, stats = sampler.batch()
    assert groups == ["b", "a", "c"]
    assert stats == DynamicSamplingStats(rounds=2, sampled=4, uniform=3, surplus=0, filled=2, missing=0)


def test_places_that_nothing_was_offered_for_stay_empty_and_are_counted():
    sampler = DynamicSampler(target=4, max_rounds=1)
    sampler.offer(["a", "b"], [ZEROS, MIXED])
    groups, stats = sampler.batch()
    assert groups == ["b", "a"]
    assert stats.missing == 2
    assert stats.filled == 1


def test_equal_rewards_are_uniform_whatever_their_value():
    sampler = DynamicSampler(target=1, max_rounds=3)
    sampler.offer(["a"], [[0.1, 0.1, 0.1]])
    assert sampler.missing == 1
    sampler.offer(["b"], [[0.1, 0.1, 0.10001]])
    assert sampler.batch()[0] == ["b"]


def test_a_round_after_the_last_one_is_refused():
    sampler = DynamicSampler(target=1, max_rounds=2)
    sampler.offer(["a"], [MIXED])
    with pytest.raises(RuntimeError, match="check `done`"):
        sampler.offer(["b"], [MIXED])


def test_a_batch_is_not_given_out_before_sampling_is_done():
    sampler = DynamicSampler(target=2, max_rounds=2)
    sampler.offer(["a"], [MIXED])
    with pytest.raises(RuntimeError, match="still wants 1 of 2 groups"):
        sampler.batch()


def test_groups_need_rewards_of_their_own():
    sampler = DynamicSampler(target=2, max_rounds=2)
    with pytest.raises(ValueError, match="2 groups came with rewards of 1"):
        sampler.offer(["a", "b"], [MIXED])
    with pytest.raises(ValueError, match="group 1 of the round has no rewards"):
        sampler.offer(["a", "b"], [MIXED, []])


@pytest.mark.parametrize(("target", "rounds"), [(0, 1), (1, 0)])
def test_an_empty_batch_or_no_rounds_are_refused(target, rounds):
    with pytest.raises(ValueError, match="can't fill a batch"):
        DynamicSampler(target, rounds)
