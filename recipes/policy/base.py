"""What the trained policies of all trainers share: the calls, the loss, and when a saved state fits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...workers.trainers.colocated import ColocatedRank
from ...workers.trainers.qat.config import QATConfig
from ..algorithms.losses import PolicyLossConfig, loss_normalizer, metric_means, policy_loss
from .batch import BatchSplit, PolicyBatch
from .state import CheckpointError, Files, frozen_digest, read_rank_state, write_rank_state

__all__ = ["AdamConfig", "CheckpointError", "OnLogits", "Policy", "PolicyBatch", "PolicyConfig"]

# (logits, micro-batch) to (loss, result).
OnLogits = Callable[[Tensor, PolicyBatch], tuple[Tensor, Any]]


@dataclass(frozen=True)
class AdamConfig:
    """Adam with decoupled weight decay (biases and norms are not decayed).

    Attributes:
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        clip_grad: the gradient's global L2 norm is scaled down to it; 0 leaves it.
        warmup_steps: optimizer steps over which the rate rises linearly to ``lr``; 0 for none.
        lr_decay: ``constant``, ``linear`` or ``cosine``, after them.
        lr_decay_steps: optimizer steps until a decaying rate is ``min_lr``, those of the warm-up included.
        min_lr: where a decaying rate ends.
        cpu_offload_fraction: part of masters and moments that is kept and stepped in host memory (Megatron's
            hybrid optimizer); 0 for none.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    warmup_steps: int = 0
    lr_decay: str = "constant"
    lr_decay_steps: int = 0
    min_lr: float = 0.0
    cpu_offload_fraction: float = 0.0


@dataclass(frozen=True)
class PolicyConfig:
    """What a policy is and how it is trained, whichever trainer does it.

    Attributes:
        model_path: local Hugging Face checkpoint folder.
        layout: parallel sizes, a trainer's own dataclass.
        loss: the policy loss.
        optimizer: Adam's settings.
        micro_batch: rows of a micro-batch.
        temperature: of the sampler; log-probabilities are taken at it.
        dtype: that is computed in; the optimizer keeps float32 masters.
        seed: of the random states.
        max_skipped_steps: steps in a row that may be left out as their gradient is not finite.
        qat: linear layers compute in four bits; None computes with the weights as they are.
        trust_remote_code: run the code that the checkpoint brings.

    Raises:
        ValueError: lists all that is wrong.
    """

    model_path: str
    layout: Any
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    micro_batch: int = 1
    temperature: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    max_skipped_steps: int = 3
    qat: QATConfig | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if found := self.violations():
            raise ValueError("policy: " + "; ".join(found))

    def violations(self) -> list[str]:
        """What of the values makes no policy."""
        found = []
        if self.micro_batch < 1:
            found.append(f"micro_batch is {self.micro_batch}; give at least 1")
        if not self.temperature > 0:
            found.append(f"temperature is {self.temperature}; logits are divided by it, so give more than 0")
        return found


class Policy(ABC):
    """One rank of a policy; all ranks call each method together.

    Every rank is given the whole batch and takes its data-parallel part; results are the whole batch's and
    the same on all ranks. ``torch.distributed`` must be initialised.

    Attributes:
        model: this rank's part of the trained model.
        reference: the frozen initial policy's, or None if the loss has no ``kl_coef``.
        step: training steps taken.
    """

    model: Any
    reference: Any

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.step = 0
        self._skipped_in_a_row = 0

    def compute_logprobs(self, batch: PolicyBatch) -> Tensor:
        """Log-probabilities of the batch's tokens under the present weights.

        Returns:
            ``[N, S]`` float32 on the CPU, in nats at ``temperature``, aligned with ``input_ids``; column 0 is
            0 and what padding columns hold has no meaning.
        """
        return self._logprobs(self.model, batch)

    def compute_reference_logprobs(self, batch: PolicyBatch) -> Tensor:
        """The same under the reference policy.

        Raises:
            RuntimeError: there is none, as the loss has no ``kl_coef``.
        """
        if self.reference is None:
            raise RuntimeError(
                "there is no reference policy: loss.kl_coef is 0; set it above 0, or don't ask for ref_logprobs"
            )
        return self._logprobs(self.reference, batch)

    def train_step(self, batch: PolicyBatch) -> dict[str, float]:
        """One optimizer step on the whole batch; it is left out if the gradient is not finite.

        Returns:
            ``loss`` of the whole batch, ``grad_norm`` before clipping, ``lr``, ``entropy`` (mean of the trained
            tokens' distributions, nats), ``skipped`` (1 if the step was left out, when the others mean nothing, else 0), and
            the means of :func:`~..algorithms.losses.metric_means`; where MTP layers are trained, ``mtp_accuracy`` (share of the
            trained tokens that the first of them, given one token less, finds the most probable).

        Raises:
            ValueError: the batch lacks advantages, old log-probabilities, or what the loss needs besides; or
                no token of it is trained on.
            FloatingPointError: more steps in a row than ``max_skipped_steps`` had to be left out. Weights and optimizer are
                as they were before the first of them.
        """
        if batch.advantages is None or batch.old_logprobs is None:
            raise ValueError(
                "a training batch needs advantages and old_logprobs; compute the latter with compute_logprobs "
                "before the first step on the batch"
            )
        normalizer = loss_normalizer(batch.loss_mask, self.config.loss.aggregation)
        if not normalizer:
            raise ValueError("loss_mask selects no token of the batch; leave the step out")
        split, local = self._split(batch)

        def loss_of(logits: Tensor, part: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert part.advantages is not None
            assert part.old_logprobs is not None
            # First: the log-probabilities may be computed in the logits' memory.
            entropy = self._token_entropy(logits)
            loss, sums = policy_loss(
                self._token_logprobs(logits, part),
                part.old_logprobs,
                part.advantages,
                part.loss_mask,
                self.config.loss,
                ref_logprobs=part.ref_logprobs,
                rollout_logprobs=part.rollout_logprobs,
                normalizer=normalizer,
            )
            sums["entropy"] = torch.where(part.loss_mask.bool(), entropy.double(), 0.0).sum()
            return loss, {"loss": loss.detach().double(), **sums}

        results = self._accumulate(local, split, loss_of)
        grad_norm, lr = self._step_optimizer()
        self.step += 1
        skipped = not math.isfinite(grad_norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row > self.config.max_skipped_steps:
            raise FloatingPointError(
                f"the gradient's norm is {grad_norm} at optimizer step {self.step}, and {self._skipped_in_a_row} steps in a row "
                "had to be left out: nothing is learned. Weights and optimizer are as they were before them. Look at the "
                "batch's advantages and log-probabilities; a lower trainer.optimizer.lr may help"
            )
        sums = self._sum_over_batch(results)
        told = {"loss": sums.pop("loss"), "grad_norm": grad_norm, "lr": lr, "skipped": float(skipped)}
        return told | metric_means([sums])

    @abstractmethod
    def colocated_rank(self) -> ColocatedRank:
        """What takes this rank off its GPU while an engine has it; all of the policy is on the GPU.

        Raises:
            RefitError: it can't leave; says why.
        """

    def save(self, folder: str | Path) -> Files:
        """Write this rank's state (weights, masters, moments, schedule, random states) into ``folder``.

        Returns:
            The files that this rank wrote, hashed as they were written.
        """
        state, files = self._save_state(Path(folder))
        identity = {"identity": self._identity(), "reference": self._reference}
        state = {**identity, "step": self.step, **state}
        return files | write_rank_state(folder, dist.get_rank(), state)

    def load(self, folder: str | Path) -> None:
        """Go on from what :meth:`save` wrote, bit for bit.

        Raises:
            CheckpointError: this rank's file is missing or damaged, or was saved with another layout, optimizer or reference policy.
        """
        state = read_rank_state(folder, dist.get_rank())
        saved, present = state.pop("identity"), self._identity()
        different = [
            f"{name} was {saved.get(name)} and is {present.get(name)}"
            for name in dict.fromkeys([*present, *saved])
            if saved.get(name) != present.get(name)
        ]
        if different:
            raise CheckpointError(
                f"checkpoint {folder} can't be resumed here: "
                + "; ".join(different)
                + ". Each rank's file holds that rank's shards and schedule; resume with the settings that saved "
                "it, or start anew from exported weights"
            )
        # None of a run without a reference policy, which may have one from now on.
        reference = state.pop("reference", None)
        if None not in (reference, self._reference) and reference != self._reference:
            raise CheckpointError(
                f"checkpoint {folder} can't be resumed here: the reference policy, which model.path holds, has other weights than the "
                "one that the run began with, so that the KL penalty would pull towards another model. Give the model.path of "
                "then, or kl_coef 0"
            )
        step = state.pop("step")
        self._load_state(Path(folder), state)
        self.step = step

    @cached_property
    def _reference(self) -> str | None:
        """Of this rank's part of a reference policy of its own; None without. One that is the model without adapters is its base."""
        own = self.reference is not None and self.reference is not self.model
        return (
            frozen_digest(self.reference if isinstance(self.reference, list) else [self.reference])
            if own
            else None
        )

    def _identity(self) -> dict[str, Any]:
        """What a rank's state depends on: how it is cut, and how it goes on."""
        optimizer = asdict(self.config.optimizer)
        if optimizer["lr_decay"] == "constant":
            # Only where the rate decays: checkpoints of runs without stay as they were.
            for name in ("lr_decay", "lr_decay_steps", "min_lr"):
                del optimizer[name]
        return {
            **asdict(self.config.layout),
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "dtype": str(self.config.dtype),
            **{f"optimizer.{name}": value for name, value in optimizer.items()},
        }

    @abstractmethod
    def _split(self, batch: PolicyBatch) -> tuple[BatchSplit, PolicyBatch]:
        """How a batch is cut, and this rank's part of it on its device."""

    @abstractmethod
    def _token_logprobs(self, logits: Tensor, part: PolicyBatch) -> Tensor:
        """``[B, S]`` float32 log-probabilities of a micro-batch's tokens, with gradient; column 0 is 0."""

    @abstractmethod
    def _token_entropy(self, logits: Tensor) -> Tensor:
        """``[B, S]`` float32, of the distribution of each token, without gradient; leaves the logits as they are."""

    @abstractmethod
    def _logprobs(self, model: Any, batch: PolicyBatch) -> Tensor:
        """What :meth:`compute_logprobs` returns, under ``model``."""

    @abstractmethod
    def _accumulate(
        self, local: PolicyBatch, split: BatchSplit, loss_of: OnLogits
    ) -> list[dict[str, Tensor]]:
        """Gradients of the sum of all micro-batches' losses on all ranks, from none; the results of this rank's."""

    @abstractmethod
    def _step_optimizer(self) -> tuple[float, float]:
        """Step, and return the gradient's global norm before clipping and the rate of the step.

        If the norm is not finite, weights and optimizer stay as they are; the schedule goes on.
        """

    @abstractmethod
    def _sum_over_batch(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums of the metrics over micro-batches and data-parallel ranks, the same on all ranks."""

    @abstractmethod
    def _save_state(self, folder: Path) -> tuple[dict[str, Any], Files]:
        """What this rank's file holds besides, and what else this rank has written into ``folder``."""

    @abstractmethod
    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Undo :meth:`_save_state`.

        Raises:
            CheckpointError: it does not fit.
        """
