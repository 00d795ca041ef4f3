"""What the policy under FSDP2 is held against."""

from __future__ import annotations

from typing import Any

import torch

from rlrefit.recipes.algorithms.losses import loss_normalizer, metric_means, policy_loss
from tests.policy_scenes import (
    ADAM,
    distributions,
    loss_config,
    plain_logprobs,
    training_batch,
    write_checkpoint,
)

__all__ = ["KINDS", "STEPS", "Oracle", "write_checkpoint"]
KINDS = ("qwen3", "qwen3-tied", "qwen3-moe")
STEPS = 2


class Oracle:
    """The same training of the whole model by one process, in float32."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.first_logprobs = plain_logprobs(self.model).detach()
        decayed = {True: [], False: []}
        for parameter in self.model.parameters():
            decayed[parameter.dim() > 1].append(parameter)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed[True], "weight_decay": ADAM.weight_decay},
                {"params": decayed[False], "weight_decay": 0.0},
            ],
            betas=ADAM.betas,
            eps=ADAM.eps,
        )
        self.metrics = [self._step(step) for step in range(STEPS)]
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        """What it found, for who asks in another process."""
        return {name: getattr(self, name) for name in ("first_logprobs", "metrics", "weights")}

    def _step(self, step: int) -> dict[str, float]:
        batch = training_batch(self.first_logprobs)
        entropy = torch.distributions.Categorical(logits=distributions(self.model).detach()).entropy()
        loss, sums = policy_loss(
            plain_logprobs(self.model),
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            loss_config(),
            normalizer=loss_normalizer(batch.loss_mask, "token"),
        )
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAM.clip_grad)
        lr = ADAM.lr * min(1.0, (step + 1) / 2)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": lr,
            "skipped": 0.0,
            "entropy": entropy[batch.loss_mask[:, 1:].bool()].mean().item(),
            **metric_means([sums]),
        }
