import math

import pytest
import torch

from rlrefit.recipes.algorithms.divergence import generation_kl, k3


def test_k3_is_exp_d_minus_d_minus_one():
    # d = ref - logp = ln 2 and -ln 2: 2 - ln 2 - 1 and 1/2 + ln 2 - 1.
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    ref = logp + torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    assert k3(logp, ref).tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5])


def test_k3_keeps_its_digits_for_policies_that_are_close():
    # d = 2^-12 is exact beside -1 in float32, and k3 is d^2 / 2 to relative precision d / 3; computed as
    # exp(d) - 1 - d, float32's spacing of 1.2e-7 at 1 is four times that whole value.
    d = 2.0**-12
    got = k3(torch.tensor([-1.0]), torch.tensor([-1.0 + d]))
    assert got.item() == pytest.approx(d * d / 2, rel=1e-3)


def test_the_mean_of_k3_over_samples_is_the_kl_divergence():
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    # Taken exactly: every outcome weighted with p stands for infinitely many samples from p.
    mean = (p * k3(p.log(), q.log())).sum().item()
    assert mean == pytest.approx((p * (p / q).log()).sum().item())


def test_generation_kl_is_the_mean_over_generated_tokens_with_samples_from_the_engine():
    # Tokens count with d = trainer - engine: ln 2 -> 1 - ln 2; 0 -> 0; the masked ones would be NaN.
    trainer = torch.tensor([[-1.0 + math.log(2), -2.0, math.nan], [0.0, -torch.inf, 0.0]])
    engine = torch.tensor([[-1.0, -2.0, -1.0], [-torch.inf, 0.0, math.nan]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert generation_kl(trainer, engine, mask) == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)


def test_generation_kl_of_equal_log_probabilities_is_exactly_zero():
    logprobs = -torch.rand(4, 5)
    assert generation_kl(logprobs, logprobs.clone(), torch.ones(4, 5)) == 0.0


def test_generation_kl_is_not_symmetric_and_takes_the_engine_as_the_sampler():
    engine, trainer = torch.tensor([[0.0]]), torch.tensor([[-3.0]])
    mask = torch.ones(1, 1)
    assert generation_kl(trainer, engine, mask) == pytest.approx(math.exp(-3) + 3 - 1, rel=1e-6)
    assert generation_kl(engine, trainer, mask) == pytest.approx(math.exp(3) - 3 - 1, rel=1e-6)


def test_generation_kl_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="selects no generated token"):
        generation_kl(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))


def test_generation_kl_of_different_shapes_is_refused():
    with pytest.raises(ValueError, match="one shape"):
        generation_kl(torch.zeros(2, 2), torch.zeros(1, 2), torch.ones(2, 2))
