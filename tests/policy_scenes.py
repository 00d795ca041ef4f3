"""What tests of both trainers' policies start from: weights that tell, a batch that is cut in every way, a training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.algorithms.losses import PolicyLossConfig
from rlrefit.recipes.policy.base import AdamConfig, CheckpointError, PolicyConfig
from rlrefit.recipes.policy.batch import PolicyBatch
from rlrefit.workers.trainers.durable import Written

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_OF_QWEN3 = {"head_dim": 8, "attention_dropout": 0.5}  # the latter no policy may have
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
# Whose routers transformers keeps in FP32, with a bias that is not trained.
ROUTED_IN_FLOAT32 = "ernie"
TEMPERATURE = 0.7
# So large that Adam's step is smooth in the gradient: where a gradient is nearly 0, its rounding would otherwise
# decide the step's sign.
ADAM = AdamConfig(lr=1e-2, eps=0.1, weight_decay=0.1, clip_grad=0.5, warmup_steps=1)
# In a row, of steps without finite gradients.
MOST_SKIPPED = 2
_CALIBRATED = count()
# Of the rows of a training batch, with their prompts; of 13 columns.
LENGTHS = (13, 8, 6, 11, 13)


def write_checkpoint(kind: str, folder: Path, **changes: Any) -> str:
    """Write a bfloat16 checkpoint and return its folder."""
    import transformers

    shape = _SHAPE | {"tie_word_embeddings": kind.endswith("-tied")} | changes
    config: Any
    if kind == ROUTED_IN_FLOAT32:
        layers = {"moe_layer_start_index": 1, "moe_layer_end_index": 1}
        config = transformers.Ernie4_5_MoeConfig(
            **shape, **layers, moe_num_experts=4, moe_k=2, moe_intermediate_size=16
        )
    elif kind == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(**shape, **_OF_QWEN3, **_MOE)
    elif kind == "gpt-oss":
        config = transformers.GptOssConfig(**shape, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    elif kind == "llama":
        config = transformers.LlamaConfig(**shape)
    else:
        config = transformers.Qwen3Config(**shape, **_OF_QWEN3)
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    # Wider than what they begin with, so that a wrong shard or head order shows in the probabilities.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


def distributions(model: Any) -> torch.Tensor:
    """Of the tokens after the first, by a plain model of transformers."""
    return torch.log_softmax(model(token_ids()).logits[:, :-1] / TEMPERATURE, -1)


def plain_logprobs(model: Any) -> torch.Tensor:
    """Log-probabilities ``[N, S]``; column 0 is 0."""
    picked = distributions(model).gather(-1, token_ids()[:, 1:, None]).squeeze(-1)
    return functional.pad(picked, (1, 0))


def loss_config(kl_coef: float = 0.0, aggregation: str = "token") -> PolicyLossConfig:
    return PolicyLossConfig(aggregation=aggregation, kl_coef=kl_coef)


def token_ids() -> torch.Tensor:
    """``[5, 13]``; both counts are odd, so that every split must pad."""
    return torch.randint(0, 64, (5, 13), generator=torch.Generator().manual_seed(1))


def make_in_four_bits(config: PolicyConfig) -> Any:
    """A policy that computes in NVFP4 or INT4; where inputs are quantized, with scales of other inputs than the one before has: one that goes on has to load them."""
    from rlrefit.recipes.policy.make import refitting_policy

    policy: Any = refitting_policy(config, RefitConfig())
    batch = plain_batch()
    if policy.qat.config.activations:
        policy.calibrate_inputs(replace(batch, input_ids=batch.input_ids.roll(next(_CALIBRATED), dims=1)))
    return policy


def input_scales(policy: Any) -> list[torch.Tensor]:
    """Of a policy that quantizes inputs; none of another."""
    if policy.config.qat is None or not policy.config.qat.activations:
        return []
    return [torch.tensor([scale for _, scale in sorted(policy.qat.state_dict().items())])]


def plain_batch() -> PolicyBatch:
    return PolicyBatch(token_ids(), torch.zeros(token_ids().shape))


def training_batch(
    logprobs: torch.Tensor, reference: torch.Tensor | None = None, *, trimmed: bool = True
) -> PolicyBatch:
    """Completions that differ in length, and ratios that differ from 1; ``trimmed``: it tells the lengths."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(token_ids().shape)
    for row, end in enumerate(LENGTHS):
        mask[row, 4:end] = 1
    noise = torch.randn(mask.shape, generator=generator) * 0.05
    return PolicyBatch(
        input_ids=token_ids(),
        loss_mask=mask,
        advantages=torch.randn(len(mask), generator=generator),
        old_logprobs=logprobs + noise,
        ref_logprobs=reference,
        lengths=torch.tensor(LENGTHS) if trimmed else None,
    )


def batch_for(policy: Any) -> PolicyBatch:
    return training_batch(policy.compute_logprobs(plain_batch()))


@dataclass(frozen=True)
class Report:
    """What one rank saw of a training; ``weights`` are whole, ``digests`` those after each step.

    ``later_logprobs`` are those of a policy that has a reference or was asked for them.
    """

    logprobs: torch.Tensor
    trimmed_logprobs: torch.Tensor
    later_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    metrics: list[dict[str, float]]
    digests: list[str]
    weights: dict[str, torch.Tensor]


def train(
    policy: Any,
    steps: int,
    digest: Callable[[Any], str],
    weights_of: Callable[[Any], dict[str, torch.Tensor]],
    *,
    has_reference: bool = False,
    trimmed: bool = True,
    looks_again: bool = False,
) -> Report:
    """Log-probabilities, training steps and weights; where it ``looks_again``, log-probabilities after them."""
    logprobs = policy.compute_logprobs(plain_batch())
    reference = policy.compute_reference_logprobs(plain_batch()) if has_reference else None
    batch = training_batch(logprobs, reference, trimmed=trimmed)
    trimmed_logprobs = policy.compute_logprobs(batch)
    metrics, digests = [], []
    for _ in range(steps):
        metrics.append(policy.train_step(batch))
        digests.append(digest(policy))
    return Report(
        logprobs=logprobs,
        trimmed_logprobs=trimmed_logprobs,
        later_logprobs=policy.compute_logprobs(plain_batch()) if has_reference or looks_again else None,
        reference_logprobs=policy.compute_reference_logprobs(plain_batch()) if has_reference else None,
        metrics=metrics,
        digests=digests,
        weights=weights_of(policy),
    )


def resume(
    make: Callable[[], Any],
    digest: Callable[[Any], str],
    folder: Path,
    leave: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train on after a save, and once more in a new policy after a load; then steps that are left out. A collective.

    ``leave`` is called where a policy is no longer needed.
    """
    policy = make()
    batch = batch_for(policy)
    policy.train_step(batch)
    report: dict[str, Any] = {"saved": _saved_files(policy, folder)}

    def go_on(trained: Any) -> tuple[Any, ...]:
        metrics = trained.train_step(batch)
        randoms = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        return metrics, digest(trained), trained.step, randoms

    report["through"] = go_on(policy)
    report["next step"] = policy.train_step(batch), digest(policy)
    leave()
    resumed = make()
    report["before"] = digest(resumed)
    resumed.load(folder)
    report["again"] = go_on(resumed)
    report["skipped"] = _skip_steps(resumed, batch, digest)
    leave()
    return report


def load_fails(
    policy: Any, digest: Callable[[Any], str], folder: Path, leave: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The error's text, and whether the policy stayed as it was."""
    before, text = digest(policy), ""
    try:
        policy.load(folder)
    except CheckpointError as error:
        text = str(error)
    leave()
    return {"text": text, "unchanged": digest(policy) == before}


def _skip_steps(policy: Any, batch: PolicyBatch, digest: Callable[[Any], str]) -> dict[str, Any]:
    """What becomes of steps on a batch with one row that has no finite advantage, and of those after them."""
    bad = replace(batch, advantages=batch.advantages.index_fill(0, torch.tensor([1]), float("nan")))
    before = digest(policy)
    found = {"skipped": [policy.train_step(bad)["skipped"] for _ in range(MOST_SKIPPED)]}
    found["unchanged"] = digest(policy) == before
    found["next step"] = policy.train_step(batch), digest(policy)
    found["skipped again"] = [policy.train_step(bad)["skipped"] for _ in range(MOST_SKIPPED)]
    try:
        policy.train_step(bad)
    except FloatingPointError:
        found["ended"] = digest(policy) == found["next step"][1]
    return found


def _saved_files(policy: Any, folder: Path) -> dict[str, Any]:
    """Save, and tell of this rank's files whether they hold what it says, and of all ranks' which there are."""
    told = policy.save(folder)
    dist.barrier()
    data = {name: (folder / name).read_bytes() for name in told}
    return {
        "told": sorted(told),
        "right": told == {n: Written(len(d), hashlib.sha256(d).hexdigest()) for n, d in data.items()},
        "there": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
    }


def assert_resumed(reports: Sequence[dict[str, Any]]) -> None:
    """What :func:`resume` found on all ranks is as it should be."""
    told = [name for report in reports for name in report["saved"]["told"]]
    assert sorted(told) == reports[0]["saved"]["there"]  # each by the one rank that wrote it
    for report in reports:
        assert report["saved"]["right"]
        assert report["saved"]["told"]
        assert report["again"] == report["through"]
        assert report["before"] != report["through"][1]
        found = report["skipped"]
        assert found["skipped"] == found["skipped again"] == [1.0] * MOST_SKIPPED
        assert found["unchanged"]
        # As if nothing had been.
        assert found["next step"] == report["next step"]
        assert found["ended"]


def assert_reference_stays(report: Report) -> None:
    """The reference policy stays where the policy began."""
    assert report.reference_logprobs is not None
    assert report.later_logprobs is not None
    assert torch.equal(report.reference_logprobs, report.logprobs)
    assert (report.later_logprobs - report.logprobs).abs().max() > 1e-3
    # Not 0: a pass with gradients rounds differently on some CPUs, and exp(d) - 1 - d in FP32 keeps 1e-7 of that.
    assert report.metrics[0]["ref_kl"] < 1e-6
    assert report.metrics[-1]["ref_kl"] > 1e-4
