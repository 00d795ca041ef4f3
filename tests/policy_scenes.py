"""What tests of both trainers' policies start from: weights that tell, and a batch that is cut in every way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlrefit.recipes.policy_batch import PolicyBatch


def spread(model: torch.nn.Module, factor: float) -> None:
    """Widen the weights from what they begin with, so that a wrong shard or head order shows in the probabilities."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(factor)


def batch_of(
    ids: torch.Tensor,
    first: int,
    lengths: Sequence[int],
    logprobs: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    trimmed: bool = True,
) -> PolicyBatch:
    """Completions that differ in length, and ratios that differ from 1.

    Args:
        ids: ``[N, S]``.
        first: column of the completions' first token.
        lengths: of the rows, with their prompts.
        logprobs: ``[N, S]``, which the old ones are near.
        reference: ``[N, S]``.
        trimmed: the batch tells the lengths.
    """
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(ids.shape)
    for row, end in enumerate(lengths):
        mask[row, first:end] = 1
    noise = torch.randn(ids.shape, generator=generator) * 0.05
    return PolicyBatch(
        input_ids=ids,
        loss_mask=mask,
        advantages=torch.randn(len(ids), generator=generator),
        old_logprobs=logprobs + noise,
        ref_logprobs=reference,
        lengths=torch.tensor(lengths) if trimmed else None,
    )
