"""From prompts and completions to the trainer's batch, and from scores to advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...workers.engines.common.completion import Completion
from ..policy.batch import PolicyBatch


@dataclass(frozen=True)
class Rollout:
    """One scored completion.

    Attributes:
        prompt_ids: tokens of the prompt.
        completion: what the engine sampled.
        reward: the reward that is trained on, shaping included.
        score: the reward function's own value.
    """

    prompt_ids: list[int]
    completion: Completion
    reward: float
    score: float


def policy_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> PolicyBatch:
    """Rows of prompt and completion, padded on the right; the mask selects the completions' tokens."""
    lengths = torch.tensor([len(r.prompt_ids) + len(r.completion.token_ids) for r in rollouts])
    shape = (len(rollouts), int(lengths.max()))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    mask = torch.zeros(shape)
    rollout_logprobs = torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt_ids)
        stop = start + len(rollout.completion.token_ids)
        input_ids[row, :start] = torch.tensor(rollout.prompt_ids)
        input_ids[row, start:stop] = torch.tensor(rollout.completion.token_ids)
        mask[row, start:stop] = 1.0
        rollout_logprobs[row, start:stop] = torch.tensor(rollout.completion.logprobs)
    return PolicyBatch(input_ids, mask, rollout_logprobs=rollout_logprobs, lengths=lengths)


def minibatches(
    batch: PolicyBatch, count: int, group_size: int, generator: torch.Generator
) -> list[PolicyBatch]:
    """Cut a batch into ``count`` parts of whole groups, in random order if there are several.

    Raises:
        ValueError: the groups can't be dealt out evenly.
    """
    groups = batch.input_ids.shape[0] // group_size
    if groups % count:
        raise ValueError(
            f"{groups} groups can't be cut into {count} minibatches; change algorithm.minibatches"
        )
    if count == 1:
        return [batch]
    order = torch.randperm(groups, generator=generator).reshape(count, -1)
    rows = (order.unsqueeze(-1) * group_size + torch.arange(group_size)).reshape(count, -1)
    return [batch.select(chosen) for chosen in rows]
