"""A PPO actor as trainers have it; it knows nothing of rlrefit, and nothing here was written for it.

The shape is that of the Megatron workers of common trainers: a base that joins ``torch.distributed``, a Megatron
worker that builds, offloads and loads, and the actor that scores and updates. ``inherit_the_mixin.py`` gives it the
refit from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ActorConfig:
    """Settings of an actor.

    Attributes:
        build_model: makes the ``AutoBridge``, its provider and this rank's model chunks, wrapped in Megatron's DDP;
            called when the worker has joined its world.
        lr: of Adam.
        clip: of the probability ratio.
        epochs: updates on each batch.
    """

    build_model: Callable[[], tuple[Any, Any, list[Any]]]
    lr: float = 1e-2
    clip: float = 0.2
    epochs: int = 4


@dataclass(frozen=True)
class Rollouts:
    """A batch: ``tokens`` [b, s]; ``mask`` [b, s], 1 where a token was sampled; ``advantages`` [b]."""

    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def of(cls, prompts: torch.Tensor, sampled: torch.Tensor, rewards: torch.Tensor) -> Rollouts:
        """Of prompts [b, p], what was sampled after them [b, n], and rewards [b], whose scale and mean don't matter."""
        return cls(
            torch.cat((prompts, sampled), 1),
            torch.cat((torch.zeros_like(prompts), torch.ones_like(sampled)), 1).float(),
            (rewards - rewards.mean()) / (rewards.std() + 1e-6),
        )


class Worker:
    """A rank of the trainer's own world."""

    def __init__(self, rank: int, world_size: int, config: ActorConfig):
        self.rank, self.config = rank, config
        # What torchrun or Ray would set.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size)


class MegatronWorker(Worker):
    """Builds a Megatron model, and moves it between device and host."""

    def init_model(self) -> None:
        """Build the model and its optimizer."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.bridge, provider, self.model = self.config.build_model()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=self.config.lr, bf16=True, clip_grad=1.0, use_distributed_optimizer=True
            ),
            self.model,
        )
        provider.finalize_model_grads_func = finalize_model_grads
        provider.grad_scale_func = self.optimizer.scale_loss

    def offload(self) -> None:
        """Parameters to (pinned) host memory, gradients away; the device's memory under both is freed."""
        pinned = self.device.type == "cuda"
        for buffer in self._buffers():
            buffer.param_data.cpu_data = torch.empty_like(buffer.param_data, device="cpu", pin_memory=pinned)
            buffer.param_data.cpu_data.copy_(buffer.param_data)
            for data in (buffer.param_data, buffer.grad_data):
                data.full_size = data.untyped_storage().nbytes()
                data.untyped_storage().resize_(0)

    def load(self) -> None:
        """The way back."""
        for buffer in self._buffers():
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(data.full_size)
            buffer.param_data.copy_(buffer.param_data.cpu_data)
            buffer.grad_data.zero_()

    def _buffers(self) -> list[Any]:
        return [b for chunk in self.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


class PPOActorWorker(MegatronWorker):
    """Scores rollouts and learns from them."""

    def log_probs(self, rollouts: Rollouts) -> torch.Tensor:
        """Log-probability of each token given those before it, [b, s]; 0 for the first."""
        found: list[torch.Tensor] = []

        def keep(log_probs: torch.Tensor) -> torch.Tensor:
            found.append(log_probs.detach())
            return log_probs.sum()

        self._run(rollouts, keep, train=False)
        return found[0]

    def update_policy(self, rollouts: Rollouts) -> float:
        """PPO's clipped objective; returns the last epoch's loss."""
        old = self.log_probs(rollouts)
        advantages = rollouts.advantages.to(self.device)[:, None]
        mask = rollouts.mask.to(self.device)

        def clipped(log_probs: torch.Tensor) -> torch.Tensor:
            ratio = (log_probs - old).exp()
            bounded = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
            return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()

        for _ in range(self.config.epochs):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self._run(rollouts, clipped, train=True)
            self.optimizer.step()
        return loss

    def _run(
        self, rollouts: Rollouts, objective: Callable[[torch.Tensor], torch.Tensor], *, train: bool
    ) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        tokens = rollouts.tokens.to(self.device)

        def forward(data: Any, chunk: Any) -> Any:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            losses = chunk(tokens, positions, None, labels=tokens.roll(-1, dims=1))

            def score(losses: torch.Tensor) -> Any:
                log_probs = torch.nn.functional.pad(-losses[:, :-1].float(), (1, 0))
                loss = objective(log_probs)
                return loss, loss.detach()

            return losses, score

        [loss] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=self.model[0],
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=not train,
        )
        return float(loss)
