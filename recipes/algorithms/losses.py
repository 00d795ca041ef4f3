"""The clipped policy-gradient loss of GRPO and DAPO, as sums that add up over micro-batches and ranks.

A trainer splits a batch into micro-batches and data-parallel ranks. A loss that averaged inside each
part would weigh short parts too much, so every term here is a sum over the part's tokens divided by a
normalizer of the *whole* batch, which the caller gives: the parts' losses (and gradients) then add up
to the whole batch's, whatever the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .divergence import k3

AGGREGATIONS = ("sequence", "token")


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which policy loss.

    Attributes:
        clip_low: the ratio is clipped below at ``1 - clip_low``; in (0, 1).
        clip_high: the ratio is clipped above at ``1 + clip_high``. Equal to ``clip_low`` it is PPO's and
            GRPO's clip; larger it is DAPO's clip-higher (arXiv 2503.14476, section 3.1: 0.2 and 0.28).
        aggregation: ``sequence`` takes the mean over each completion's tokens, then over completions
            (GRPO, arXiv 2402.03300, eq. 3); ``token`` the mean over all tokens of the batch (DAPO, eq. 8).
        kl_coef: weight of the k3 penalty to the reference policy; 0 leaves it out (as DAPO does).
        tis_cap: cap of the truncated importance-sampling weight that corrects for the engine's
            probabilities differing from the trainer's; None leaves the correction out.

    Raises:
        ValueError: a value makes no loss; all that is wrong is listed at once.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "sequence"
    kl_coef: float = 0.0
    tis_cap: float | None = None

    def __post_init__(self) -> None:
        found = []
        if not 0 < self.clip_low < 1:
            found.append(
                f"clip_low is {self.clip_low}; the ratio's lower bound 1 - clip_low must lie in (0, 1)"
            )
        if not self.clip_high > 0:
            found.append(f"clip_high is {self.clip_high}; give a number above 0")
        if self.aggregation not in AGGREGATIONS:
            found.append(f"aggregation is {self.aggregation!r}; choose one of {', '.join(AGGREGATIONS)}")
        if not self.kl_coef >= 0:
            found.append(f"kl_coef is {self.kl_coef}; a negative weight would reward divergence")
        if self.tis_cap is not None and not self.tis_cap > 0:
            found.append(
                f"tis_cap is {self.tis_cap}; it would zero every weight; give a number above 0 or null"
            )
        if found:
            raise ValueError("policy loss: " + "; ".join(found))


def loss_normalizer(mask: Tensor, aggregation: str) -> float:
    """What a whole batch's loss sum is divided by.

    Args:
        mask: shape ``[N, T]``, true or nonzero for the completion tokens that are trained on.
        aggregation: ``sequence`` counts the rows with at least one such token (rows that only pad a
            micro-batch count for nothing); ``token`` counts the tokens.

    Returns:
        The count; with data parallelism add up the ranks' counts.

    Raises:
        ValueError: an unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}")
    selected = mask.bool()
    return float(selected.sum() if aggregation == "token" else selected.any(dim=-1).sum())


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: PolicyLossConfig,
    *,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    normalizer: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's share of the policy loss, and sums of its metrics.

    Per token, with ``r = exp(logprobs - old_logprobs)`` and the completion's advantage ``A``::

        w * max(-r * A, -clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3(logprobs, ref_logprobs)

    Sources: PPO's clip (arXiv 1707.06347, eq. 7); GRPO (arXiv 2402.03300, eq. 3 and 4); clip-higher and
    token-level loss of DAPO (arXiv 2503.14476). ``w = min(exp(old_logprobs - rollout_logprobs), tis_cap)``,
    without gradient, is truncated importance sampling (Ionides 2008, and Yao et al. 2025 for this use) between the engine that sampled and
    the trainer's policy before the update; 1 if ``tis_cap`` is None.

    Args:
        logprobs: shape ``[N, T]``, floating, with gradient: log-probabilities (nats) of the completion
            tokens under the policy that is trained.
        old_logprobs: shape ``[N, T]``: the same by the trainer before the first update on this batch.
        advantages: shape ``[N]``, one for each completion.
        mask: shape ``[N, T]``, true or nonzero for the tokens trained on. What other positions hold
            (padding's -inf, NaN) has no influence on the loss or the gradient.
        ref_logprobs: shape ``[N, T]``, by the reference policy; needed if ``kl_coef`` isn't 0.
        rollout_logprobs: shape ``[N, T]``, as the engine reported them; needed if ``tis_cap`` is set.
        normalizer: :func:`loss_normalizer` of the whole batch, over all micro-batches and ranks.

    Returns:
        The loss, a scalar with gradient; losses of all micro-batches and ranks *sum* to the batch's.
        The metrics, detached float64 scalars that add up likewise: see :func:`metric_means`.

    Raises:
        ValueError: shapes that don't fit, a needed input that is missing, or a normalizer that isn't
            above 0.
    """
    _check_inputs(
        logprobs, old_logprobs, advantages, mask, config, ref_logprobs, rollout_logprobs, normalizer
    )
    selected = mask.bool()
    # Masked before exp(), not after: inf * 0 is NaN, in the value or in the gradient.
    logp = torch.where(selected, logprobs, 0.0)
    old = torch.where(selected, old_logprobs, 0.0).detach()
    advantage = advantages.detach().to(logp.dtype).unsqueeze(-1)

    ratio = torch.exp(logp - old)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = torch.maximum(-ratio * advantage, -clipped * advantage)
    sums = {
        "tokens": selected,
        "ratio": ratio,
        "policy_kl": k3(old, logp.detach()),
        "clip_high": (advantage > 0) & (ratio > 1 + config.clip_high),
        "clip_low": (advantage < 0) & (ratio < 1 - config.clip_low),
    }
    if config.tis_cap is not None and rollout_logprobs is not None:
        importance = torch.exp(old - torch.where(selected, rollout_logprobs, 0.0)).detach()
        per_token = per_token * importance.clamp(max=config.tis_cap)
        sums["tis_ratio"] = importance
        sums["tis_capped"] = importance > config.tis_cap
    if ref_logprobs is not None:
        penalty = k3(logp, torch.where(selected, ref_logprobs, 0.0).detach())
        sums["ref_kl"] = penalty
        if config.kl_coef:
            per_token = per_token + config.kl_coef * penalty

    per_token = torch.where(selected, per_token, 0.0)
    if config.aggregation == "sequence":
        per_token = per_token / selected.sum(dim=-1, keepdim=True).clamp(min=1)
    metrics = {
        name: torch.where(selected, value.detach().double(), 0.0).sum() for name, value in sums.items()
    }
    return per_token.sum() / normalizer, metrics


def metric_means(sums: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Means per token of the metrics that the micro-batches (or ranks) of one batch returned.

    Returns:
        ``tokens`` (their number); ``ratio`` (mean of new over old probability); ``policy_kl`` (k3 of the
        old policy against the new one, nats); ``clip_high`` and ``clip_low`` (shares of tokens that the
        clip deprived of gradient, by side) and ``clip_fraction`` (both); where they were computed,
        ``ref_kl`` (k3 to the reference, nats), ``tis_ratio`` (mean of the uncapped weight) and
        ``tis_capped`` (share of tokens at the cap). Only ``tokens``, 0, where no token was trained on.
    """
    totals: dict[str, float] = {}
    for part in sums:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    tokens = totals.pop("tokens", 0.0)
    if not tokens:
        return {"tokens": 0.0}
    means = {name: total / tokens for name, total in totals.items()}
    return {"tokens": tokens, "clip_fraction": means["clip_high"] + means["clip_low"], **means}


def _check_inputs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: PolicyLossConfig,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    normalizer: float,
) -> None:
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs have shape {tuple(logprobs.shape)}; [completions, tokens] is wanted")
    others = {
        "old_logprobs": old_logprobs,
        "mask": mask,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
    }
    for name, tensor in others.items():
        # Broadcasting would silently give every completion the first one's numbers.
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and logprobs {tuple(logprobs.shape)}; pad both alike"
            )
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}; one for each of the {logprobs.shape[0]} "
            "completions is wanted"
        )
    if config.kl_coef and ref_logprobs is None:
        raise ValueError(
            f"kl_coef is {config.kl_coef} but ref_logprobs is None: there is no reference to stay near; pass "
            "the reference policy's log-probabilities or set kl_coef to 0"
        )
    if config.tis_cap is not None and rollout_logprobs is None:
        raise ValueError(
            f"tis_cap is {config.tis_cap} but rollout_logprobs is None: the engine's probabilities are "
            "unknown; have the engine return log-probabilities or set tis_cap to null"
        )
    if not normalizer > 0:
        raise ValueError(
            f"normalizer is {normalizer}: no token of the whole batch is trained on; skip the update, or pass "
            "loss_normalizer(mask, aggregation) summed over all micro-batches and ranks"
        )
