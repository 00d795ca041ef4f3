"""The policy under FSDP2: a transformers model, torch's AdamW, and its state in torch's distributed checkpoints.

Precision follows verl and NeMo-RL: shards, gradients and Adam's moments are float32, layers compute in ``dtype`` on
parameters gathered in it, and gradients are reduced in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...integration.weights.endpoints import rank_device
from ...workers.trainers.colocated import TorchRank
from ...workers.trainers.fsdp.adapters import adapter_layers
from ...workers.trainers.fsdp.model import FSDPLayout, FSDPModel, build_fsdp
from ..algorithms.rates import learning_rate
from .base import OnLogits, Policy, PolicyConfig
from .batch import BatchSplit, PolicyBatch
from .forward import TOKENS_AT_A_TIME, aligned, token_entropy
from .state import Files, frozen_digest, random_state, set_random_state
from .state_fsdp import load_sharded, save_sharded


@dataclass(frozen=True)
class FSDPPolicyConfig(PolicyConfig):
    """What a policy under FSDP2 is besides.

    Attributes:
        layout: parallel sizes.
        reshard_after_forward: free gathered parameters after the forward pass.
        cpu_offload: keep shards, gradients and the optimizer's state in host memory, and step there.
        recompute: compute every layer's activations again in the backward pass.
        lora: peft's ``LoraConfig``, whose factors alone are trained; None trains all weights.
    """

    layout: FSDPLayout = field(default_factory=FSDPLayout)
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    recompute: bool = False
    lora: Any = None

    def violations(self) -> list[str]:
        found = super().violations()
        if self.optimizer.cpu_offload_fraction:
            found.append(
                "optimizer.cpu_offload_fraction is Megatron's; give 0, and cpu_offload to offload all"
            )
        return found


class FSDPPolicy(Policy):
    """A policy under FSDP2.

    Attributes:
        model: the root that ``fully_shard`` was applied to.
        reference: the frozen initial policy, its shards in the dtype that is computed in, or None if the loss has no
            ``kl_coef``. With LoRA it is the model itself without the factors, and needs no memory.
    """

    config: FSDPPolicyConfig

    def __init__(self, config: FSDPPolicyConfig) -> None:
        super().__init__(config)
        torch.manual_seed(config.seed)
        # Weights that are not trained need no masters.
        keep_dtype = torch.float32 if config.lora is None else config.dtype
        built = self._build(keep_dtype, config.reshard_after_forward, config.lora)
        self.model = built.model
        self.reference = None
        if config.loss.kl_coef > 0 and config.lora is not None:
            self.reference = self.model
        elif config.loss.kl_coef > 0:
            # It has no backward pass that would use what stays gathered.
            self.reference = self._build(config.dtype, True).model.requires_grad_(False)
        self._replica, _, self._tp_rank = built.mesh.get_coordinate()
        self._data_parallel = dist.get_world_size() // config.layout.tensor_parallel
        self._cut = built.cut_by_tensor_parallel
        self._optimizer = self._build_optimizer()

    def _build(self, keep_dtype: torch.dtype, reshard_after_forward: bool, lora: Any = None) -> FSDPModel:
        config = self.config
        return build_fsdp(
            config.model_path,
            config.layout,
            dtype=config.dtype,
            keep_dtype=keep_dtype,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=config.cpu_offload,
            recompute=config.recompute,
            lora=lora,
            trust_remote_code=config.trust_remote_code,
        )

    def compute_reference_logprobs(self, batch: PolicyBatch) -> Tensor:
        layers = adapter_layers(self.model) if self.reference is self.model else []
        for layer in layers:
            layer.enable_adapters(False)
        if layers:
            # peft freezes what it disables, and FSDP takes the dtype of gradients from what is trained in its first pass.
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(True)
        try:
            return super().compute_reference_logprobs(batch)
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        adam = self.config.optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": adam.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, foreach=True)

    def colocated_rank(self) -> TorchRank:
        # Offloaded shards are in host memory at all times, and FSDP wants them there.
        models = [self.model]
        frozen = [self.reference] if self.reference is not None and self.reference is not self.model else []
        rank, device = dist.get_rank(), rank_device()
        if self.config.cpu_offload:
            return TorchRank([], self._optimizer, device, rank, offloaded=[*models, *frozen])
        return TorchRank(models, self._optimizer, device, rank, frozen)

    def _split(self, batch: PolicyBatch) -> tuple[BatchSplit, PolicyBatch]:
        split = BatchSplit.of(
            batch,
            data_parallel=self._data_parallel,
            micro_batch=self.config.micro_batch,
            token_multiple=1,
            micro_batch_multiple=1,
        )
        rank = dist.get_rank() // self.config.layout.tensor_parallel
        return split, split.local(batch, rank).to(rank_device())

    def _token_logprobs(self, logits: Tensor, part: PolicyBatch) -> Tensor:
        scores = logits[:, :-1].split(TOKENS_AT_A_TIME, dim=1)
        targets = part.input_ids[:, 1:].split(TOKENS_AT_A_TIME, dim=1)
        # Computed again in the backward pass, so that float32 copies of all logits never stand at once.
        found = [
            checkpoint(self._picked, *each, use_reentrant=False, preserve_rng_state=False)
            for each in zip(scores, targets, strict=True)
        ]
        return functional.pad(torch.cat(found, 1), (1, 0))

    def _picked(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of ``targets`` ``[B, S]``, each under the logits of its place."""
        predictions = logits.float()
        if self.config.temperature != 1.0:
            predictions = predictions / self.config.temperature
        loss = functional.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="none")
        return -loss.view_as(targets)

    def _token_entropy(self, logits: Tensor) -> Tensor:
        return aligned(token_entropy(logits, self.config.temperature, logits.shape[-1]))

    def _logits(self, model: Any, part: PolicyBatch) -> Tensor:
        # No mask: attention is causal, so the padding on the right is seen by padding only.
        return model(input_ids=part.input_ids, use_cache=False).logits

    def _logprobs(self, model: Any, batch: PolicyBatch) -> Tensor:
        split, local = self._split(batch)
        model.eval()
        with torch.no_grad():
            own = split.joined(
                [self._token_logprobs(self._logits(model, part), part) for part in split.parts(local)]
            )
        ranks = own.new_empty(dist.get_world_size(), *own.shape)
        dist.all_gather(list(ranks), own.contiguous())
        return split.restored(ranks[:: self.config.layout.tensor_parallel]).cpu()

    def _accumulate(
        self, local: PolicyBatch, split: BatchSplit, loss_of: OnLogits
    ) -> list[dict[str, Tensor]]:
        self._set_deterministic()
        self._optimizer.zero_grad()
        results = []
        for number, part in enumerate(split.parts(local), 1):
            # Copies add their gradients up once; shards every time, as whole gradients would fill the memory.
            self.model.set_requires_all_reduce(number == split.micro_batches)
            loss, result = loss_of(self._logits(self.model, part), part)
            # FSDP averages over data-parallel ranks, where the loss's parts are to be summed.
            (loss * self._data_parallel).backward()
            results.append(result)
        return results

    def _set_deterministic(self) -> None:
        """Train what log-probabilities are taken of: no jitter or sampling in routers, which training mode may turn on."""
        self.model.eval()
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # alone, else it would not recompute

    def _step_optimizer(self) -> tuple[float, float]:
        adam = self.config.optimizer
        gradients = dict(self._gradients())
        norm = self._global_norm(gradients)
        if adam.clip_grad and norm > adam.clip_grad:
            torch._foreach_mul_(list(gradients.values()), adam.clip_grad / (norm + 1e-6))
        lr = learning_rate(
            self.step,
            adam.lr,
            warmup_steps=adam.warmup_steps,
            decay=adam.lr_decay,
            decay_steps=adam.lr_decay_steps,
            min_lr=adam.min_lr,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm, lr

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of the gradients."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield (
                    name,
                    parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad,
                )

    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        """L2 norm of the whole model's gradient, each element counted once however often it is held."""
        counted = [
            gradient
            for name, gradient in gradients.items()
            if self._replica == 0 and (self._tp_rank == 0 or name in self._cut)
        ]
        total = torch.zeros((), dtype=torch.float64, device=rank_device())
        if counted:
            total += torch.stack(torch._foreach_norm(counted)).to(total).square().sum()
        dist.all_reduce(total)
        return math.sqrt(total.item()) if math.isfinite(total.item()) else total.item()

    def _sum_over_batch(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        names = sorted(results[0])
        totals = torch.stack([torch.stack([result[name] for result in results]).sum() for name in names])
        if self._tp_rank:
            totals.zero_()  # TP ranks see the same rows
        dist.all_reduce(totals)
        return dict(zip(names, totals.tolist(), strict=True))

    def _identity(self) -> dict[str, Any]:
        lora = self.config.lora
        own = () if lora is None else ("r", "lora_alpha", "target_modules", "use_rslora")
        found = super()._identity() | {f"lora.{name}": getattr(lora, name) for name in own}
        return found if lora is None else found | {"lora.base": self._base}

    @cached_property
    def _base(self) -> str:
        return frozen_digest([self.model])

    def _save_state(self, folder: Path) -> tuple[dict[str, Any], Files]:
        files = save_sharded(folder, self.model, self._optimizer, self._tp_rank, self.config.lora is not None)
        return {"random": random_state()}, files

    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        load_sharded(folder, self.model, self._optimizer, self._tp_rank, self.config.lora is not None)
        set_random_state(state["random"])
