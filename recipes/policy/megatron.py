"""The policy on Megatron-core, trained under its own schedules and optimizer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...integration.weights.endpoints import rank_device
from ...workers.trainers.colocated import MegatronRank
from ...workers.trainers.megatron.adapters import adapters_off
from ...workers.trainers.megatron.model import Lora, MegatronLayout, Recompute, build_megatron
from .base import OnLogits, Policy, PolicyConfig
from .batch import BatchSplit, PolicyBatch
from .context import whole_rows
from .forward import aligned, run_schedule, token_entropy, token_logprobs
from .state import Files, frozen_digest, restore_training_state, training_state

# Transformer Engine's FP8 products take tokens by so many.
_FP8_TOKENS = 16


@dataclass(frozen=True)
class MegatronPolicyConfig(PolicyConfig):
    """What a policy on Megatron-core is besides.

    Attributes:
        layout: parallel sizes.
        distributed_optimizer: shard masters and moments over data-parallel ranks.
        recompute: activations that training computes again; None keeps them all.
        fp8_param: linear layers compute in FP8 and keep their weights so. The reference policy's do not.
        lora: adapters, which alone are trained; None trains all weights.
        mtp_loss_scaling_factor: of the loss of the checkpoint's MTP layers, which training adds, and whose gradients end at
            these layers; 0 leaves them out. The reference policy has none.
    """

    layout: MegatronLayout = field(default_factory=MegatronLayout)
    distributed_optimizer: bool = True
    recompute: Recompute | None = None
    fp8_param: bool = False
    lora: Lora | None = None
    mtp_loss_scaling_factor: float = 0.0

    def violations(self) -> list[str]:
        found = []
        if self.dtype == torch.float16:
            found.append(
                "dtype is float16, whose gradients need a loss scale, and there is none; give bfloat16 or float32"
            )
        found += super().violations()
        if self.optimizer.cpu_offload_fraction:
            found += _offload_problems(self.distributed_optimizer)
        if self.fp8_param and (reason := _no_fp8()):
            found.append(
                f"fp8_param needs a GPU with FP8 products (Hopper or later), and {reason}; give false"
            )
        return found


class MegatronPolicy(Policy):
    """A policy on Megatron-core.

    Attributes:
        model: this rank's model chunks, in Megatron's DDP.
        bridge: Megatron-Bridge's ``AutoBridge`` for them.
        reference: the frozen initial policy's chunks, or None if the loss has no ``kl_coef``. With LoRA it is the model itself
            without the adapters, and needs no memory.

    Raises:
        ValueError: the model can't be built so (:func:`~...workers.trainers.megatron.model.build_megatron`), or has context
            parallelism and is more than a model of text.
    """

    config: MegatronPolicyConfig
    model: list[Any]
    reference: list[Any] | None

    def __init__(self, config: MegatronPolicyConfig) -> None:
        super().__init__(config)
        built = self._build(trained=True)
        self.model = built.model
        if config.layout.context_parallel > 1:
            _check_takes_parts_of_rows(self.model)
        self.bridge = built.bridge
        self.reference = None
        if config.loss.kl_coef > 0 and config.lora is not None:
            self.reference = self.model
        elif config.loss.kl_coef > 0:
            self.reference = self._build(trained=False).model
            for chunk in self.reference:
                chunk.requires_grad_(False).eval()
        self._vocab_size: int = built.provider.vocab_size
        self._optimizer, self._scheduler = self._build_optimizer(built.provider)
        if built.unquantized is not None:
            self._optimizer.reload_model_params(built.unquantized)

    def compute_reference_logprobs(self, batch: PolicyBatch) -> Tensor:
        with adapters_off(self.model) if self.config.lora is not None else nullcontext():
            return super().compute_reference_logprobs(batch)

    def colocated_rank(self) -> MegatronRank:
        frozen = self.reference if self.reference is not None and self.reference is not self.model else []
        return MegatronRank(self.model, self._optimizer, rank_device(), dist.get_rank(), frozen=frozen)

    def _accumulate(
        self, local: PolicyBatch, split: BatchSplit, loss_of: OnLogits
    ) -> list[dict[str, Tensor]]:
        # Megatron averages over micro-batches and data-parallel ranks, where the loss's parts are to be summed.
        parts = split.micro_batches * split.data_parallel

        def scaled(logits: Tensor, part: PolicyBatch) -> tuple[Tensor, Any]:
            loss, result = loss_of(logits, part)
            return loss * parts, result

        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if not self._trains_mtp:
            return run_schedule(self.model, local, split, scaled, forward_only=False)
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Counted

        Counted.clean_metrics_in_tracker()
        results = run_schedule(self.model, local, split, scaled, forward_only=False, trains_mtp=True)
        if results:
            right = Counted.tracker["correct_values"][0].double()
            for index, result in enumerate(results):
                # Counted over all micro-batches together.
                result["mtp_accuracy"] = right if index == 0 else torch.zeros_like(right)
        return results

    def _step_optimizer(self) -> tuple[float, float]:
        # Before the step, which would be taken with whatever the gradient is.
        self._optimizer.prepare_grads()
        grad_norm = self._optimizer.get_grad_norm()
        # Megatron's norm is that of the policy's own gradients; those of MTP layers have one of their own, by which they are clipped.
        beside = self._optimizer._compute_grad_norms_by_group().values() if self._trains_mtp else ()
        if all(map(math.isfinite, (grad_norm, *beside))):
            self._optimizer.step()
        else:
            grad_norm = math.nan
        lr = self._scheduler.get_lr(self._optimizer.param_groups[0])
        self._scheduler.step(increment=1)
        return float(grad_norm), float(lr)

    def _save_state(self, folder: Path) -> tuple[dict[str, Any], Files]:
        alone = self.config.lora is not None
        return training_state(self.model, self._optimizer, self._scheduler, alone), {}

    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        alone = self.config.lora is not None
        restore_training_state(state, self.model, self._optimizer, self._scheduler, alone)

    def _build(self, *, trained: bool) -> Any:
        return build_megatron(
            self.config.model_path,
            self.config.layout,
            dtype=self.config.dtype,
            seed=self.config.seed,
            wrap_with_ddp=trained,
            distributed_optimizer=self.config.distributed_optimizer,
            recompute=self.config.recompute if trained else None,
            fuse_gradient_accumulation=self.config.qat is None,
            fp8_param=self.config.fp8_param and trained,
            lora=self.config.lora,
            mtp_loss_scaling_factor=self.config.mtp_loss_scaling_factor if trained else 0.0,
            trust_remote_code=self.config.trust_remote_code,
        )

    def _build_optimizer(self, model_config: Any) -> tuple[Any, Any]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        adam = self.config.optimizer
        decays = adam.lr_decay != "constant"
        min_lr = adam.min_lr if decays else adam.lr
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=adam.lr,
                min_lr=min_lr,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.betas[0],
                adam_beta2=adam.betas[1],
                adam_eps=adam.eps,
                clip_grad=adam.clip_grad,
                bf16=self.config.dtype == torch.bfloat16,
                params_dtype=self.config.dtype,
                use_distributed_optimizer=self.config.distributed_optimizer,
                optimizer_cpu_offload=adam.cpu_offload_fraction > 0,
                optimizer_offload_fraction=adam.cpu_offload_fraction,
                # The hybrid optimizer keeps the masters, as the precision-aware one does.
                use_precision_aware_optimizer=adam.cpu_offload_fraction > 0,
                fp8_recipe="blockwise" if self.config.fp8_param else None,
            ),
            self.model,
        )
        scheduler = OptimizerParamScheduler(
            optimizer,
            # Not from 0: the first step would be taken for nothing.
            init_lr=adam.lr / (adam.warmup_steps + 1),
            max_lr=adam.lr,
            min_lr=min_lr,
            lr_warmup_steps=adam.warmup_steps,
            lr_decay_steps=adam.lr_decay_steps if decays else adam.warmup_steps + 1,
            lr_decay_style=adam.lr_decay,
            start_wd=adam.weight_decay,
            end_wd=adam.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        model_config.finalize_model_grads_func = finalize_model_grads
        model_config.grad_scale_func = optimizer.scale_loss
        return optimizer, scheduler

    def _identity(self) -> dict[str, Any]:
        lora = {} if self.config.lora is None else asdict(self.config.lora) | {"base": self._base}
        return {
            **super()._identity(),
            "distributed_optimizer": self.config.distributed_optimizer,
            **{f"lora.{name}": value for name, value in lora.items()},
            # Only where it is on: checkpoints of runs without stay as they were.
            **({"fp8_param": True} if self.config.fp8_param else {}),
            **({"mtp": True} if self._trains_mtp else {}),
        }

    @property
    def _trains_mtp(self) -> bool:
        return self.config.mtp_loss_scaling_factor > 0

    @cached_property
    def _base(self) -> str:
        return frozen_digest(self.model)

    def _split(self, batch: PolicyBatch) -> tuple[BatchSplit, PolicyBatch]:
        from megatron.core import parallel_state

        layout = self.config.layout
        split = BatchSplit.of(
            batch,
            data_parallel=parallel_state.get_data_parallel_world_size(),
            micro_batch=self.config.micro_batch,
            token_multiple=_token_multiple(layout, _FP8_TOKENS if self.config.fp8_param else 1),
            micro_batch_multiple=layout.pipeline_parallel if layout.virtual_pipeline else 1,
        )
        return split, split.local(batch, parallel_state.get_data_parallel_rank()).to(rank_device())

    def _token_logprobs(self, logits: Tensor, part: PolicyBatch) -> Tensor:
        return token_logprobs(logits, part.input_ids, self.config.temperature, self._vocab_size)

    def _token_entropy(self, logits: Tensor) -> Tensor:
        from megatron.core import parallel_state

        columns = logits.shape[-1]
        valid = self._vocab_size - parallel_state.get_tensor_model_parallel_rank() * columns
        group = parallel_state.get_tensor_model_parallel_group()
        entropy = token_entropy(logits, self.config.temperature, min(columns, valid), group)
        return aligned(whole_rows(entropy))

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


def _no_fp8() -> str:
    if not torch.cuda.is_available():
        return "this process has no GPU"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 9 else f"this one has compute capability {major}.{minor}"


def _check_takes_parts_of_rows(model: list[Any]) -> None:
    """Raise ValueError if the model would take a part of a row for a whole one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.utils import unwrap_model

    kind = type(unwrap_model(model)[0])
    if not issubclass(kind, GPTModel | HybridModel):
        raise ValueError(
            f"context_parallel is above 1, and {kind.__name__}, a model of more than text, wants whole rows, which it cuts "
            "itself; Megatron's GPTModel and HybridModel take parts. Give context_parallel 1"
        )


def _token_multiple(layout: MegatronLayout, tokens: int) -> int:
    """What row lengths must be multiples of, where a rank computes with its tokens by ``tokens``.

    With context parallelism a rank has two chunks of a row, whose whole TP cuts once more.
    """
    context, tensor = layout.context_parallel, layout.tensor_parallel
    return context * math.lcm(2 if context > 1 else 1, tensor * tokens)


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
