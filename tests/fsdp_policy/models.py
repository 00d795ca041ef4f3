"""Tiny checkpoints, a batch, and the oracle: one process, transformers and torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rlrefit.recipes.algorithms.losses import PolicyLossConfig, loss_normalizer, metric_means, policy_loss
from rlrefit.recipes.policy.base import AdamConfig
from rlrefit.recipes.policy.batch import PolicyBatch
from tests.policy_scenes import batch_of, spread

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.5,  # which no policy may have
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
KINDS = ("qwen3", "qwen3-tied", "qwen3-moe")
# Whose routers transformers keeps in FP32, with a bias that is not trained.
ROUTED_IN_FLOAT32 = "ernie"
TEMPERATURE = 0.7
# So large that Adam's step is smooth in the gradient: where a gradient is nearly 0, its rounding would otherwise
# decide the step's sign.
ADAM = AdamConfig(lr=1e-2, eps=0.1, weight_decay=0.1, clip_grad=0.5, warmup_steps=1)
# Of the rows of a training batch; of 13 columns.
LENGTHS = (13, 8, 6, 11, 13)
STEPS = 2


def loss_config(kl_coef: float = 0.0) -> PolicyLossConfig:
    return PolicyLossConfig(aggregation="token", kl_coef=kl_coef)


def write_checkpoint(kind: str, folder: Path) -> str:
    """Write a bfloat16 checkpoint and return its folder."""
    import transformers

    if kind == ROUTED_IN_FLOAT32:
        shape = {key: value for key, value in _SHAPE.items() if key not in ("head_dim", "attention_dropout")}
        config: Any = transformers.Ernie4_5_MoeConfig(
            **shape,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=16,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
        )
    elif kind == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(**_SHAPE, **_MOE, tie_word_embeddings=False)
    else:
        config = transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=kind == "qwen3-tied")
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    spread(model, 3.0)
    model.save_pretrained(folder)
    return str(folder)


def token_ids() -> torch.Tensor:
    """``[5, 13]``; both counts are odd, so that every split must pad."""
    return torch.randint(0, 64, (5, 13), generator=torch.Generator().manual_seed(1))


def plain_batch() -> PolicyBatch:
    return PolicyBatch(token_ids(), torch.zeros(token_ids().shape))


def training_batch(logprobs: torch.Tensor) -> PolicyBatch:
    return batch_of(token_ids(), 4, LENGTHS, logprobs)


class Oracle:
    """The same training of the whole model by one process, in float32."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.first_logprobs = self.logprobs().detach()
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

    def logprobs(self) -> torch.Tensor:
        picked = self._distributions().gather(-1, token_ids()[:, 1:, None]).squeeze(-1)
        return functional.pad(picked, (1, 0))

    def _distributions(self) -> torch.Tensor:
        return torch.log_softmax(self.model(token_ids()).logits[:, :-1] / TEMPERATURE, -1)

    def _entropy(self, mask: torch.Tensor) -> float:
        each = torch.distributions.Categorical(logits=self._distributions().detach()).entropy()
        return each[mask[:, 1:].bool()].mean().item()

    def _step(self, step: int) -> dict[str, float]:
        batch = training_batch(self.first_logprobs)
        assert batch.old_logprobs is not None
        assert batch.advantages is not None
        entropy = self._entropy(batch.loss_mask)
        loss, sums = policy_loss(
            self.logprobs(),
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
            "entropy": entropy,
            **metric_means([sums]),
        }
