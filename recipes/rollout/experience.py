"""A step's rollouts: draw prompts, generate groups, score them, and make the trainer's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...workers.engines.common.completion import Completion
from ..algorithms.dynamic_sampling import DynamicSampler
from ..algorithms.shaping import overlong_penalty
from ..config.schema import TrainConfig
from ..data.prompts import Prompt
from ..policy.batch import PolicyBatch
from ..rewards.scorer import Answer, Scorer, Scores
from ..run.inputs import RunInputs
from .base import RolloutGroup, Sampling


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


# Keeps the seeds of a step's rounds, and of the replicas within a round, apart from the next step's.
_SEEDS_PER_STEP = 1 << 16
_SEEDS_PER_ROUND = 1 << 8


@dataclass(frozen=True)
class Experience:
    """A step's rollouts, group after group, and what collecting them took.

    Attributes:
        rollouts: ``prompts_per_step * group_size`` of them.
        sampled: rollouts that were generated, those that did not make the batch included.
        rounds: rounds of generation.
        uniform_groups: groups whose rewards were all equal, in all rounds.
        overtime: completions that took longer to judge than allowed, and are worth 0.
        mean_score: the reward function's mean over everything that was generated, without shaping; under
            dynamic sampling the batch alone would flatter the policy.
    """

    rollouts: list[Rollout]
    sampled: int
    rounds: int
    uniform_groups: int
    overtime: int
    mean_score: float


class ExperienceCollector:
    """Generates and scores.

    Args:
        config: the recipe.
        engines: the rollout engines.
        inputs: prompts, their order, and the tokenizer, which decodes completions for the reward function.
        scorer: the reward function.
    """

    def __init__(self, config: TrainConfig, engines: RolloutGroup, inputs: RunInputs, scorer: Scorer) -> None:
        self._engines = engines
        self._inputs = inputs
        self._scorer = scorer
        self._algorithm = config.algorithm
        self._generation = config.generation
        self._samples = config.validation.samples
        self._seed = config.seed

    @property
    def position(self) -> dict[str, Any]:
        """Position in the training prompts, for a checkpoint."""
        return self._inputs.sampler.state_dict()

    def collect(self, step: int) -> Experience:
        """The rollouts of ``step``; equal for equal weights, seed and position in the data, where the engine reads the seed.

        Raises:
            RunError: an engine failed.
            RewardError: the reward function raised or returned no finite number.
        """
        algorithm = self._algorithm
        rounds = algorithm.max_sampling_rounds if algorithm.dynamic_sampling else 1
        sampler: DynamicSampler[list[Rollout]] = DynamicSampler(algorithm.prompts_per_step, rounds)
        scores: list[float] = []
        overtime = 0
        while not sampler.done:
            round_index = len(scores) // (algorithm.prompts_per_step * algorithm.group_size)
            groups, late = self._generate_groups(step, round_index)
            overtime += late
            # By score, as DAPO filters: a group that differs in length penalties alone has learned nothing.
            sampler.offer(groups, [[r.score for r in group] for group in groups])
            scores.extend(r.score for group in groups for r in group)
        groups, stats = sampler.batch()
        return Experience(
            rollouts=[rollout for group in groups for rollout in group],
            sampled=len(scores),
            rounds=stats.rounds,
            uniform_groups=stats.uniform,
            overtime=overtime,
            mean_score=sum(scores) / len(scores),
        )

    def batch(self, experience: Experience) -> PolicyBatch:
        """The trainer's batch of a step's rollouts."""
        return policy_batch(experience.rollouts, self._inputs.pad_token_id)

    def validate(self) -> float:
        """Mean score of greedy completions of the first ``validation.samples`` held-out prompts."""
        prompts = self._inputs.validation
        chosen = [prompts[i] for i in range(min(self._samples, len(prompts)))]
        sampling = Sampling(self._generation.max_new_tokens, 0.0, self._seed)
        completions = self._engines.generate([p.token_ids for p in chosen], sampling)
        scores = self._score(chosen, completions).values
        return sum(scores) / len(scores)

    def _generate_groups(self, step: int, round_index: int) -> tuple[list[list[Rollout]], int]:
        """Groups of one round, and how many of their completions took too long to judge."""
        size = self._algorithm.group_size
        drawn = [self._inputs.train[i] for i in self._inputs.sampler.draw(self._algorithm.prompts_per_step)]
        repeated = [prompt for prompt in drawn for _ in range(size)]
        seed = self._seed + step * _SEEDS_PER_STEP + round_index * _SEEDS_PER_ROUND
        sampling = Sampling(self._generation.max_new_tokens, self._generation.temperature, seed)
        completions = self._engines.generate([p.token_ids for p in repeated], sampling)
        scores = self._score(repeated, completions)
        shaped = self._shape(scores.values, completions)
        rollouts = [
            Rollout(list(prompt.token_ids), completion, reward, score)
            for prompt, completion, reward, score in zip(
                repeated, completions, shaped, scores.values, strict=True
            )
        ]
        return [rollouts[i : i + size] for i in range(0, len(rollouts), size)], scores.overtime

    def _score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Scores:
        # Only the end itself is left out: a pad or other special token in the text is the policy's mistake.
        said = [c.token_ids[:-1] if c.finished else c.token_ids for c in completions]
        texts = self._inputs.tokenizer.batch_decode(said, skip_special_tokens=False)
        return self._scorer.score_all(
            [Answer(p, text, c.finished) for p, text, c in zip(prompts, texts, completions, strict=True)]
        )

    def _shape(self, scores: Sequence[float], completions: Sequence[Completion]) -> list[float]:
        buffer = self._algorithm.overlong_buffer
        if not buffer:
            return list(scores)
        lengths = torch.tensor([len(c.token_ids) for c in completions])
        penalty = overlong_penalty(lengths, self._generation.max_new_tokens, buffer)
        return (
            torch.tensor(scores, dtype=torch.float64) + self._algorithm.overlong_penalty * penalty
        ).tolist()
