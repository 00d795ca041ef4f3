"""Estimates of KL divergence from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Per-token estimate of ``KL(p || ref)`` for tokens sampled from ``p``: unbiased, never negative.

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3: with
    ``d = ref_logp - logp``, ``exp(d) - 1 - d``; it is the penalty of GRPO (arXiv 2402.03300, eq. 4).
    ``expm1`` keeps the digits that ``exp(d) - 1`` would lose for the small ``d`` of a healthy run.

    Args:
        logp: log-probabilities (nats) of the sampled tokens under the policy that sampled them, any shape.
        ref_logp: the same tokens under the other policy, same shape.

    Returns:
        Nats, in the shape and dtype of the inputs.
    """
    difference = ref_logp - logp
    return torch.expm1(difference) - difference


def generation_kl(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> float:
    """Mean over the generated tokens of the k3 estimate of ``KL(engine || trainer)``, in nats.

    The engine sampled the tokens, so with ``d = trainer - engine`` the estimate is
    ``exp(d) - d - 1``. It is 0 where both hold the same weights and compute alike, about the square of
    the relative rounding error for BF16 kernels that differ, and large after a bad refit.

    Args:
        trainer_logprobs: shape ``[N, T]``, log-probabilities (nats) by the trainer of the sampled tokens.
        engine_logprobs: shape ``[N, T]``, those that the engine reported while sampling them.
        mask: shape ``[N, T]``, true or nonzero for generated tokens; other positions may hold anything.

    Raises:
        ValueError: the shapes differ, or the mask selects no token, so that there is no mean.
    """
    if not trainer_logprobs.shape == engine_logprobs.shape == mask.shape:
        raise ValueError(
            f"trainer_logprobs {tuple(trainer_logprobs.shape)}, engine_logprobs "
            f"{tuple(engine_logprobs.shape)} and mask {tuple(mask.shape)} must have one shape: both sides "
            "have to score the same tokens"
        )
    generated = mask.bool()
    if not bool(generated.any()):
        raise ValueError("the mask selects no generated token; there is nothing to take the generation KL of")
    per_token = k3(engine_logprobs[generated].double(), trainer_logprobs[generated].double())
    return float(per_token.mean())
