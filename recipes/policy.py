"""The trained policy of one rank: log-probabilities, training steps, and its state on disk."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..integration.endpoints import rank_device
from ..workers.megatron.model import MegatronLayout, Recompute, build_megatron
from .algorithms.losses import PolicyLossConfig, loss_normalizer, metric_means, policy_loss
from .policy_batch import BatchSplit, PolicyBatch
from .policy_forward import run_schedule, token_logprobs
from .policy_state import (
    CheckpointError,
    read_rank_state,
    restore_training_state,
    training_state,
    write_rank_state,
)

__all__ = ["AdamConfig", "CheckpointError", "MegatronPolicy", "PolicyBatch", "PolicyConfig"]


@dataclass(frozen=True)
class AdamConfig:
    """Adam with decoupled weight decay (biases and norms are not decayed) and a constant rate after warm-up.

    Attributes:
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        clip_grad: the gradient's global L2 norm is scaled down to it; 0 leaves it.
        warmup_steps: optimizer steps over which the rate rises linearly to ``lr``; 0 for none.
        cpu_offload_fraction: part of masters and moments that is kept and stepped in host memory (Megatron's
            hybrid optimizer); 0 for none.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    warmup_steps: int = 0
    cpu_offload_fraction: float = 0.0


@dataclass(frozen=True)
class PolicyConfig:
    """What a policy is and how it is trained.

    Attributes:
        model_path: local Hugging Face checkpoint folder.
        layout: parallel sizes.
        loss: the policy loss.
        optimizer: Adam's settings.
        micro_batch: rows of a micro-batch.
        temperature: of the sampler; log-probabilities are taken at it.
        dtype: of parameters and activations; the optimizer keeps float32 masters.
        seed: of Megatron's random states.
        distributed_optimizer: shard masters and moments over data-parallel ranks.
        recompute: activations that training computes again; None keeps them all.
    """

    model_path: str
    layout: MegatronLayout = field(default_factory=MegatronLayout)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    micro_batch: int = 1
    temperature: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    distributed_optimizer: bool = True
    recompute: Recompute | None = None

    def __post_init__(self) -> None:
        found = []
        if self.layout.context_parallel != 1:
            found.append(
                f"layout.context_parallel is {self.layout.context_parallel}; log-probabilities are computed on "
                "whole rows, so give 1 and use tensor_parallel (with sequence parallelism) for long rows"
            )
        if self.micro_batch < 1:
            found.append(f"micro_batch is {self.micro_batch}; give at least 1")
        if not self.temperature > 0:
            found.append(f"temperature is {self.temperature}; logits are divided by it, so give more than 0")
        if self.optimizer.cpu_offload_fraction:
            found += _offload_problems(self.distributed_optimizer)
        if found:
            raise ValueError("policy: " + "; ".join(found))


class MegatronPolicy:
    """A policy on Megatron-core; one object on each rank, and all ranks call each method together.

    Every rank is given the whole batch and takes its data-parallel part; results are the whole batch's and
    the same on all ranks. ``torch.distributed`` must be initialised.

    Attributes:
        model: this rank's model chunks, in Megatron's DDP.
        bridge: Megatron-Bridge's ``AutoBridge`` for them.
        reference: the frozen initial policy's chunks, or None if the loss has no ``kl_coef``.
        step: training steps taken.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.step = 0
        built = self._build(trained=True)
        self.model: list[Any] = built.model
        self.bridge = built.bridge
        self.reference: list[Any] | None = None
        if config.loss.kl_coef > 0:
            self.reference = self._build(trained=False).model
            for chunk in self.reference:
                chunk.requires_grad_(False).eval()
        self._vocab_size: int = built.provider.vocab_size
        self._optimizer, self._scheduler = self._build_optimizer(built.provider)

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
        """One optimizer step on the whole batch.

        Returns:
            ``loss`` of the whole batch, ``grad_norm`` before clipping, ``lr``, and the means of
            :func:`~.algorithms.losses.metric_means`.

        Raises:
            ValueError: the batch lacks advantages, old log-probabilities, or what the loss needs besides; or
                no token of it is trained on.
            FloatingPointError: the gradient's norm is not finite; the weights are lost, so load a checkpoint.
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
        # Megatron averages over micro-batches and data-parallel ranks, where the loss's parts are to be summed.
        parts = split.micro_batches * split.data_parallel

        def loss_of(logits: Tensor, part: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert part.advantages is not None
            assert part.old_logprobs is not None
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
            return loss * parts, {"loss": loss.detach().double(), **sums}

        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = run_schedule(self.model, local, split, loss_of, forward_only=False)
        _, grad_norm, _ = self._optimizer.step()
        lr = self._scheduler.get_lr(self._optimizer.param_groups[0])
        self._scheduler.step(increment=1)
        self.step += 1
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient's norm is {float(grad_norm)} at step {self.step}: the weights and the optimizer's "
                "state hold NaN now and must not be sent to an engine; load the last checkpoint, and look at the "
                "batch's advantages and log-probabilities"
            )
        sums = self._sum_over_batch(results)
        loss = sums.pop("loss")
        return {"loss": loss, "grad_norm": float(grad_norm), "lr": float(lr), **metric_means([sums])}

    def save(self, folder: str | Path) -> None:
        """Write this rank's state (weights, masters, moments, schedule, random states) into ``folder``."""
        state = training_state(self.model, self._optimizer, self._scheduler)
        write_rank_state(folder, dist.get_rank(), {"identity": self._identity(), "step": self.step, **state})

    def load(self, folder: str | Path) -> None:
        """Go on from what :meth:`save` wrote, bit for bit.

        Raises:
            CheckpointError: this rank's file is missing or damaged, or was saved with another layout or optimizer.
        """
        state = read_rank_state(folder, dist.get_rank())
        saved, present = state.pop("identity"), self._identity()
        different = [
            f"{name} was {saved.get(name)} and is {present[name]}"
            for name in present
            if saved.get(name) != present[name]
        ]
        if different:
            raise CheckpointError(
                f"checkpoint {folder} can't be resumed here: "
                + "; ".join(different)
                + ". Each rank's file holds that rank's shards and schedule; resume with the settings that saved "
                "it, or start anew from exported weights"
            )
        step = state.pop("step")
        restore_training_state(state, self.model, self._optimizer, self._scheduler)
        self.step = step

    def _build(self, *, trained: bool) -> Any:
        return build_megatron(
            self.config.model_path,
            self.config.layout,
            dtype=self.config.dtype,
            seed=self.config.seed,
            wrap_with_ddp=trained,
            distributed_optimizer=self.config.distributed_optimizer,
            recompute=self.config.recompute if trained else None,
        )

    def _build_optimizer(self, model_config: Any) -> tuple[Any, Any]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        adam = self.config.optimizer
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=adam.lr,
                min_lr=adam.lr,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.betas[0],
                adam_beta2=adam.betas[1],
                adam_eps=adam.eps,
                clip_grad=adam.clip_grad,
                bf16=self.config.dtype == torch.bfloat16,
                fp16=self.config.dtype == torch.float16,
                params_dtype=self.config.dtype,
                use_distributed_optimizer=self.config.distributed_optimizer,
                optimizer_cpu_offload=adam.cpu_offload_fraction > 0,
                optimizer_offload_fraction=adam.cpu_offload_fraction,
                # The hybrid optimizer keeps the masters, as the precision-aware one does.
                use_precision_aware_optimizer=adam.cpu_offload_fraction > 0,
            ),
            self.model,
        )
        scheduler = OptimizerParamScheduler(
            optimizer,
            # Not from 0: the first step would be taken for nothing.
            init_lr=adam.lr / (adam.warmup_steps + 1),
            max_lr=adam.lr,
            min_lr=adam.lr,
            lr_warmup_steps=adam.warmup_steps,
            lr_decay_steps=adam.warmup_steps + 1,
            lr_decay_style="constant",
            start_wd=adam.weight_decay,
            end_wd=adam.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        model_config.finalize_model_grads_func = finalize_model_grads
        model_config.grad_scale_func = optimizer.scale_loss
        return optimizer, scheduler

    def _identity(self) -> dict[str, Any]:
        """What a rank's state depends on: how it is cut, and how it goes on."""
        return {
            **asdict(self.config.layout),
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "dtype": str(self.config.dtype),
            "distributed_optimizer": self.config.distributed_optimizer,
            **{f"optimizer.{name}": value for name, value in asdict(self.config.optimizer).items()},
        }

    def _split(self, batch: PolicyBatch) -> tuple[BatchSplit, PolicyBatch]:
        from megatron.core import parallel_state

        layout = self.config.layout
        split = BatchSplit.of(
            batch,
            data_parallel=parallel_state.get_data_parallel_world_size(),
            micro_batch=self.config.micro_batch,
            token_multiple=layout.tensor_parallel,
            micro_batch_multiple=layout.pipeline_parallel if layout.virtual_pipeline else 1,
        )
        return split, split.local(batch, parallel_state.get_data_parallel_rank()).to(rank_device())

    def _token_logprobs(self, logits: Tensor, part: PolicyBatch) -> Tensor:
        return token_logprobs(logits, part.input_ids, self.config.temperature, self._vocab_size)

    def _logprobs(self, model: list[Any], batch: PolicyBatch) -> Tensor:
        from megatron.core import parallel_state

        split, local = self._split(batch)

        def logprobs_of(logits: Tensor, part: PolicyBatch) -> tuple[Tensor, Tensor]:
            return logits.new_zeros(()), self._token_logprobs(logits, part)

        for chunk in model:
            chunk.eval()
        parts = run_schedule(model, local, split, logprobs_of, forward_only=True)
        shape = (split.local_rows, split.widths[0])
        own = split.joined(parts) if parts else torch.empty(shape, device=rank_device())
        dist.broadcast(
            own,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        ranks = own.new_empty(split.data_parallel, *shape)
        dist.all_gather(list(ranks), own.contiguous(), group=parallel_state.get_data_parallel_group())
        return split.restored(ranks).cpu()

    def _sum_over_batch(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums of the metrics over micro-batches and data-parallel ranks, the same on all ranks."""
        from megatron.core import parallel_state

        message: list[dict[str, float] | None] = [None]
        if results:
            names = sorted(results[0])
            totals = torch.stack([torch.stack([result[name] for result in results]).sum() for name in names])
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            message = [dict(zip(names, totals.tolist(), strict=True))]
        dist.broadcast_object_list(
            message,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
            device=rank_device(),
        )
        assert message[0] is not None
        return message[0]


def _offload_problems(distributed_optimizer: bool) -> list[str]:
    found = []
    if not distributed_optimizer:
        found.append(
            "optimizer.cpu_offload_fraction needs distributed_optimizer, which Megatron builds it on"
        )
    if not torch.cuda.is_available():
        found.append(
            "optimizer.cpu_offload_fraction moves the optimizer off GPUs, and this process has none; give 0"
        )
    return found
