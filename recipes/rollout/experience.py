"""Rollouts of a step: draw prompts, generate groups, score them, and fill the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...workers.engines.common.completion import Completion
from ..algorithms.dynamic_sampling import DynamicSampler
from ..algorithms.shaping import overlong_penalty
from ..config.schema import AlgorithmConfig, GenerationConfig
from ..data.prompts import Prompt, PromptDataset, PromptSampler
from ..rewards.scorer import Answer, Scorer, Scores
from .base import RolloutGroup, Sampling
from .batching import Rollout

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
        engines: the rollout engines.
        prompts: training prompts.
        sampler: order of the prompts; its state is the position in the data.
        scorer: the reward function.
        tokenizer: decodes completions for the reward function.
        algorithm: group size, dynamic sampling, overlong shaping.
        generation: lengths and temperature.
        seed: of the run.
    """

    def __init__(
        self,
        engines: RolloutGroup,
        prompts: PromptDataset,
        sampler: PromptSampler,
        scorer: Scorer,
        tokenizer: Any,
        algorithm: AlgorithmConfig,
        generation: GenerationConfig,
        seed: int,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._sampler = sampler
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._algorithm = algorithm
        self._generation = generation
        self._seed = seed

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

    def validate(self, prompts: PromptDataset, samples: int) -> float:
        """Mean score of greedy completions of the first ``samples`` held-out prompts."""
        chosen = [prompts[i] for i in range(min(samples, len(prompts)))]
        sampling = Sampling(self._generation.max_new_tokens, 0.0, self._seed)
        completions = self._engines.generate([p.token_ids for p in chosen], sampling)
        scores = self._score(chosen, completions).values
        return sum(scores) / len(scores)

    def _generate_groups(self, step: int, round_index: int) -> tuple[list[list[Rollout]], int]:
        """Groups of one round, and how many of their completions took too long to judge."""
        size = self._algorithm.group_size
        drawn = [self._prompts[i] for i in self._sampler.draw(self._algorithm.prompts_per_step)]
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
        texts = self._tokenizer.batch_decode(said, skip_special_tokens=False)
        return self._scorer.score_all(
            [Answer(p, text, c.finished) for p, text, c in zip(prompts, texts, completions, strict=True)]
        )

    def _shape(self, scores: Sequence[float], completions: Sequence[Completion]) -> list[float]:
        buffer = self._algorithm.overlong_buffer
        if not buffer:
            return list(scores)
        lengths = torch.tensor([len(c.token_ids) for c in completions])
        penalty = overlong_penalty(lengths, self._generation.max_new_tokens, buffer)
        return (torch.tensor(scores) + self._algorithm.overlong_penalty * penalty).tolist()
