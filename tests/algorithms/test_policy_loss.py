import math

import pytest
import torch

from rlrefit.recipes.algorithms.losses import PolicyLossConfig, loss_normalizer, metric_means, policy_loss

GRPO = PolicyLossConfig(clip_low=0.2, clip_high=0.2, aggregation="sequence")
DAPO = PolicyLossConfig(clip_low=0.2, clip_high=0.28, aggregation="token")


def of_ratios(ratios):
    """New log-probabilities (with gradient) that have these ratios to old ones of -1."""
    old = torch.full((len(ratios), len(ratios[0])), -1.0, dtype=torch.float64)
    new = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return new, old


def random_batch(rows=12, columns=6, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    old = -torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    lengths[0] = columns
    return {
        "logprobs": old + noise(0.4),
        "old": old,
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(columns) < lengths).to(torch.int64),
        "ref": old + noise(0.3),
        "rollout": old + noise(0.2),
    }


@pytest.mark.parametrize(
    ("config", "normalizer", "expected"),
    [
        # Ratios 1 on 3 tokens with A = 2: mean -2. One token of ratio 1.1 with A = -1: 1.1. (-2 + 1.1) / 2.
        (GRPO, 2.0, -0.45),
        # The same tokens: (3 * -2 + 1.1) / 4.
        (DAPO, 4.0, -1.225),
    ],
)
def test_the_loss_is_a_mean_over_completions_of_their_tokens_mean_or_over_all_tokens(
    config, normalizer, expected
):
    new, old = of_ratios([[1.0, 1.0, 1.0], [1.1, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert loss_normalizer(torch.cat([mask, torch.zeros(1, 3)]), config.aggregation) == normalizer
    loss, _ = policy_loss(new, old, torch.tensor([2.0, -1.0]), mask, config, normalizer=normalizer)
    assert loss.item() == pytest.approx(expected)


def test_a_ratio_above_the_upper_clip_stops_the_gradient_of_a_good_token_only():
    new, old = of_ratios([[1.5, 1.25, 0.5, 1.0], [1.5, 0.9, 0.5, 1.0]])
    old.requires_grad_()
    advantages = torch.tensor([1.0, -1.0], requires_grad=True)
    loss, sums = policy_loss(new, old, advantages, torch.ones(2, 4), DAPO, normalizer=1.0)
    loss.backward()
    # d(-r A)/dlogp = -r A where it isn't clipped. A > 0: 1.5 > 1.28 is clipped, 1.25 is not as it were at 1.2, and
    # 0.5 may still rise. A < 0: 0.5 < 0.8 is clipped, 1.5 may still fall.
    assert new.grad[0].tolist() == pytest.approx([0.0, -1.25, -0.5, -1.0])
    assert new.grad[1].tolist() == pytest.approx([1.5, 0.9, 0.0, 1.0])
    # -1.28 - 1.25 - 0.5 - 1 + 1.5 + 0.9 + 0.8 + 1
    assert loss.item() == pytest.approx(0.17)
    assert old.grad is advantages.grad is None
    means = metric_means([sums])
    assert means["tokens"] == 8
    assert [means[name] for name in ("clip_high", "clip_low", "clip_fraction")] == [1 / 8, 1 / 8, 2 / 8]
    assert means["ratio"] == pytest.approx((1.5 + 1.25 + 0.5 + 1 + 1.5 + 0.9 + 0.5 + 1) / 8)
    assert not any(value.requires_grad for value in sums.values())
    assert metric_means([]) == {"tokens": 0.0}


def test_the_kl_penalty_is_added_with_its_weight_and_pulls_towards_the_reference():
    new, old = of_ratios([[1.0]])
    ref = old + math.log(2)
    config = PolicyLossConfig(kl_coef=0.5)
    loss, metrics = policy_loss(
        new, old, torch.zeros(1), torch.ones(1, 1), config, ref_logprobs=ref, normalizer=1.0
    )
    loss.backward()
    # k3 with d = ln 2 is 1 - ln 2; its derivative by logp is 1 - exp(d) = -1.
    assert loss.item() == pytest.approx(0.5 * (1 - math.log(2)))
    assert new.grad.item() == pytest.approx(-0.5)
    assert metrics["ref_kl"].item() == pytest.approx(1 - math.log(2))


def test_the_importance_weight_is_capped_and_scales_the_policy_term_alone():
    # Weights exp(old - rollout): 1.5, and 4 capped at 2. Policy terms -1 and -1; k3 = 1 - ln 2 each.
    new, old = of_ratios([[1.0, 1.0]])
    rollout = old - torch.tensor([[1.5, 4.0]], dtype=torch.float64).log()
    config = PolicyLossConfig(aggregation="token", kl_coef=1.0, tis_cap=2.0)
    loss, metrics = policy_loss(
        new,
        old,
        torch.ones(1),
        torch.ones(1, 2),
        config,
        ref_logprobs=old + math.log(2),
        rollout_logprobs=rollout.requires_grad_(),
        normalizer=2.0,
    )
    loss.backward()
    assert loss.item() == pytest.approx((-1.5 - 2.0) / 2 + 1 - math.log(2))
    assert new.grad.tolist() == [pytest.approx([(-1.5 - 1) / 2, (-2.0 - 1) / 2])]
    assert rollout.grad is None
    means = metric_means([metrics])
    assert means["tis_ratio"] == pytest.approx((1.5 + 4.0) / 2)
    assert means["tis_capped"] == pytest.approx(0.5)


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
@pytest.mark.parametrize("cuts", [[4, 4, 4], [1, 10, 1], [7, 5]])
def test_losses_gradients_and_metrics_of_micro_batches_add_up_to_the_whole_batchs(aggregation, cuts):
    batch = random_batch()
    config = PolicyLossConfig(aggregation=aggregation, clip_high=0.28, kl_coef=0.1, tis_cap=1.2)
    normalizer = loss_normalizer(batch["mask"], aggregation)

    def run(parts):
        new = batch["logprobs"].clone().requires_grad_()
        total, sums = 0.0, []
        for rows in parts:
            loss, metrics = policy_loss(
                new[rows],
                batch["old"][rows],
                batch["advantages"][rows],
                batch["mask"][rows],
                config,
                ref_logprobs=batch["ref"][rows],
                rollout_logprobs=batch["rollout"][rows],
                normalizer=normalizer,
            )
            loss.backward()
            total += loss.item()
            sums.append(metrics)
        return total, new.grad, metric_means(sums)

    whole = run([torch.arange(12)])
    split = run(torch.arange(12).split(cuts))
    assert split[0] == pytest.approx(whole[0], rel=1e-12)
    assert torch.allclose(split[1], whole[1], rtol=1e-12, atol=0)
    assert split[2] == pytest.approx(whole[2], rel=1e-12)


def test_what_padding_positions_hold_reaches_neither_loss_nor_gradient():
    mask = torch.tensor([[1, 0]])
    for junk in (math.nan, math.inf, -math.inf):
        new = torch.tensor([[-1.0, junk]], requires_grad=True)
        other = torch.tensor([[-1.0, -junk]])
        config = PolicyLossConfig(kl_coef=0.1, tis_cap=2.0)
        loss, metrics = policy_loss(
            new,
            other,
            torch.tensor([1.0]),
            mask,
            config,
            ref_logprobs=other,
            rollout_logprobs=other,
            normalizer=1.0,
        )
        loss.backward()
        assert loss.item() == -1.0
        assert new.grad.tolist() == [[-1.0, 0.0]]
        assert all(math.isfinite(value) for value in metric_means([metrics]).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.ones(1)}, "one for each of the 2 completions"),
        ({"mask": torch.ones(1, 3)}, "mask has shape"),
        ({"old_logprobs": torch.zeros(2, 1)}, "old_logprobs has shape"),
        ({"normalizer": 0.0}, "no token of the whole batch"),
        ({"config": PolicyLossConfig(kl_coef=0.1)}, "ref_logprobs is None"),
        ({"config": PolicyLossConfig(tis_cap=2.0)}, "rollout_logprobs is None"),
        ({"logprobs": torch.zeros(3)}, "is wanted"),
    ],
)
def test_inputs_that_would_broadcast_or_are_missing_are_refused(change, message):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 3),
        "config": GRPO,
        "normalizer": 1.0,
    } | change
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments)


def test_a_bad_configuration_lists_everything_that_is_wrong_with_it():
    with pytest.raises(ValueError) as caught:
        PolicyLossConfig(clip_low=1.5, clip_high=0, aggregation="mean", kl_coef=-1, tis_cap=0)
    for name in ("clip_low", "clip_high", "aggregation", "kl_coef", "tis_cap"):
        assert name in str(caught.value)
    with pytest.raises(ValueError, match="sequence, token"):
        loss_normalizer(torch.ones(1, 1), "mean")
