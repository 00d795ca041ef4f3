"""The training loop: refit, validate, generate, train; one line of metrics a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..integration.records.record import RefitSummary
from .algorithms.advantages import group_advantages
from .algorithms.divergence import generation_kl
from .config.schema import TrainConfig
from .policy.batch import PolicyBatch
from .policy.group import TrainerGroup
from .refits import Refits
from .rollout.experience import Experience, ExperienceCollector, minibatches
from .run.checkpoint import CheckpointStore
from .run.cluster import RunError
from .run.files import MetricsFile

Metrics = dict[str, Any]


class _Stopwatch:
    """Seconds by stage of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


class TrainingLoop:
    """Drives trainer and engines through the steps of a run.

    All values on a step's line belong to the weights that the step began with: version ``step - 1``
    is what was refitted, validated and sampled from, and what the KL compares.

    Args:
        config: the recipe.
        trainers: trainer ranks.
        refits: moves the weights, and lets trainer and engines take turns where they share devices.
        collector: generates and scores; its position in the training data is saved with checkpoints.
        checkpoints: where the run is saved.
        metrics: the run's metrics file.
        on_step: called with the line of each step.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainers: TrainerGroup,
        refits: Refits,
        collector: ExperienceCollector,
        checkpoints: CheckpointStore,
        metrics: MetricsFile,
        on_step: Callable[[Metrics], None],
    ) -> None:
        self._config = config
        self._trainers = trainers
        self._refits = refits
        self._collector = collector
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._on_step = on_step
        self._saved = -1

    def run(self, first_step: int, stop: Callable[[], bool]) -> int:
        """Run from ``first_step`` (counted from 1) to the end, or until ``stop`` says so between two steps.

        Returns:
            The last step that was completed; a run that was stopped has saved a checkpoint of it.
        """
        last = self._config.algorithm.steps
        every = self._config.checkpoint.every
        done = first_step - 1
        for step in range(first_step, last + 1):
            line = self._step(step)
            done = step
            # The line first: a run that resumes drops lines after its checkpoint, but can't make one up.
            self._metrics.append(line)
            if every and (step % every == 0 or step == last):
                self._save(step)
            self._on_step(line)
            if stop() and step < last:
                if self._saved != step:
                    self._save(step)
                break
        return done

    def _step(self, step: int) -> Metrics:
        watch = _Stopwatch()
        with watch.stage("refit"):
            refit = self._refits.run(step - 1)
        val_reward = None
        if self._validates(step):
            with watch.stage("validate"):
                val_reward = self._refits.generate(self._collector.validate)
        with watch.stage("generate"):
            experience = self._refits.generate(lambda: self._collector.collect(step))
        if refit is not None:
            _require_version(experience, refit.version)
        with watch.stage("hand_over"):
            self._refits.hand_over()
        with watch.stage("logprobs"):
            batch = self._refits.train(lambda: self._batch(experience))
        assert batch.old_logprobs is not None
        assert batch.rollout_logprobs is not None
        kl = generation_kl(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
        with watch.stage("train"):
            trained = self._refits.train(lambda: self._train(step, batch))
        if self._config.policy.qat == "w4a4" and step == 1:
            # The scales before were of prompts alone.
            with watch.stage("calibrate_inputs"):
                self._refits.train(lambda: self._trainers.calibrate_inputs(batch))
        if self._config.policy.refit.kv_scales:
            with watch.stage("calibrate"):
                self._refits.train(lambda: self._refits.calibrate(batch))
        rewards = [r.reward for r in experience.rollouts]
        lengths = [len(r.completion.token_ids) for r in experience.rollouts]
        return {
            "step": step,
            "reward/mean": experience.mean_score,
            "reward/batch_mean": sum(rewards) / len(rewards),
            "val/reward": val_reward,
            "generation_kl": kl,
            "loss": trained.pop("loss"),
            "completion/tokens_mean": sum(lengths) / len(lengths),
            "completion/finished": sum(r.completion.finished for r in experience.rollouts) / len(lengths),
            "sampling/rounds": experience.rounds,
            "sampling/generated": experience.sampled,
            "sampling/uniform_groups": experience.uniform_groups,
            "reward/overtime": experience.overtime,
            "weights/version": experience.rollouts[0].completion.version,
            **{f"train/{name}": value for name, value in trained.items()},
            "time/step": watch.total,
            **{f"time/{name}": seconds for name, seconds in watch.seconds.items()},
            **_refit_metrics(refit),
            **self._refits.stage_metrics(),
        }

    def _validates(self, step: int) -> bool:
        every = self._config.validation.every
        return bool(every) and ((step - 1) % every == 0 or step == self._config.algorithm.steps)

    def _batch(self, experience: Experience) -> PolicyBatch:
        batch = self._collector.batch(experience)
        # In the numbers of the reward function: two that float32 can't tell apart are no equal ones.
        rewards = torch.tensor([r.reward for r in experience.rollouts], dtype=torch.float64)
        algorithm = self._config.algorithm
        advantages = group_advantages(rewards, algorithm.group_size, normalize_std=algorithm.normalize_std)
        reference = self._trainers.compute_reference_logprobs(batch) if algorithm.kl_coef > 0 else None
        return replace(
            batch,
            advantages=advantages.float(),
            old_logprobs=self._trainers.compute_logprobs(batch),
            ref_logprobs=reference,
        )

    def _train(self, step: int, batch: PolicyBatch) -> Metrics:
        algorithm = self._config.algorithm
        order = torch.Generator().manual_seed(self._config.seed + step)
        parts = minibatches(batch, algorithm.minibatches, algorithm.group_size, order)
        return step_metrics([self._trainers.train_step(part) for part in parts])

    def _save(self, step: int) -> None:
        try:
            extra = {"sampler": self._collector.position, "refits": self._refits.state()}
            with self._checkpoints.writing(step, extra) as unfinished:
                unfinished.files.update(self._trainers.save(unfinished.folder))
        except (OSError, ValueError) as error:  # a full disk; ranks that don't see the driver's files
            raise RunError(
                f"step {step} can't be saved: {error}. Earlier checkpoints are as they were; resume=true goes on from the newest"
            ) from error
        self._saved = step


def step_metrics(results: Sequence[Mapping[str, float]]) -> Metrics:
    """Means of what the optimizer steps of one training step reported, but for those that were left out.

    Returns:
        ``skipped``, the number left out, and the means of the others; None where all were.
    """
    taken = [result for result in results if not result["skipped"]]
    means = {name: sum(r[name] for r in taken) / len(taken) if taken else None for name in results[0]}
    return means | {"skipped": len(results) - len(taken)}


def _require_version(experience: Experience, version: int) -> None:
    others = {r.completion.version for r in experience.rollouts} - {version}
    if others:
        raise RunError(
            f"completions were sampled from weights {sorted(others)} after version {version} was committed; an engine "
            "missed a refit, and the batch would mix policies"
        )


def _refit_metrics(refit: RefitSummary | None) -> Metrics:
    if refit is None:
        return {}
    return {
        "refit/version": refit.version,
        "refit/seconds": refit.seconds,
        "refit/bytes_bulk": refit.bytes_bulk,
        "refit/bytes_misc": refit.bytes_misc,
        "refit/bytes_verified": refit.bytes_verified,
        "refit/bytes_wire": refit.bytes_wire,
        "refit/bytes_dense": refit.bytes_bulk + refit.bytes_misc,
        **({"refit/changed_share": refit.changed_share} if refit.changed_share is not None else {}),
        "refit/kept_gb_per_s": refit.kept_gb_per_s,
        "refit/peak_extra_bytes": refit.peak_extra_bytes,
        **{f"refit/time/{stage}": seconds for stage, seconds in refit.seconds_by_stage.items()},
    }
