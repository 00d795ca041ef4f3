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


def test_generation_kl_is_the_mean_over_generated_tokens_with_samples_from_the_engine():
    # Tokens count with d = trainer - engine: ln 2 -> 1 - ln 2; 0 -> 0; the masked ones would be NaN.
    trainer = torch.tensor([[-1.0 + math.log(2), -2.0, math.nan], [0.0, -torch.inf, 0.0]])
    engine = torch.tensor([[-1.0, -2.0, -1.0], [-torch.inf, 0.0, math.nan]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert generation_kl(trainer, engine, mask) == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)
    # The other way round it is another number: k3 of -ln 2.
    assert generation_kl(engine, trainer, mask) == pytest.approx((math.log(2) - 0.5) / 2, rel=1e-6)
    assert generation_kl(engine, engine.clone(), mask) == 0.0


@pytest.mark.parametrize(
    ("engine", "mask", "told"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), "no generated token"),
        (torch.zeros(1, 2), torch.ones(2, 2), "one shape"),
    ],
)
def test_generation_kl_of_no_tokens_or_of_different_shapes_is_refused(engine, mask, told):
    with pytest.raises(ValueError, match=told):
        generation_kl(torch.zeros(2, 2), engine, mask)
