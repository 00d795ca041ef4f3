"""What the ranks of the tests of MTP layers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from policy_ranks import exported, leave_layout

from tests import policy_scenes as scenes

STEPS = 2
WEIGHT = 0.1


@dataclass(frozen=True)
class Built:
    """What a trainer has of a checkpoint with MTP layers.

    Attributes:
        exported: what Bridge exports.
        sent: names of the manifest that the source makes.
        unequal: weights that Bridge exports with other bits than the checkpoint's.
        misc: what has no shard rule here, and why.
        left: parameters of MTP layers in a trainer that was built without them.
        exported_without: what Bridge exports of that one.
    """

    exported: set[str]
    sent: set[str]
    unequal: list[str]
    misc: dict[str, str]
    left: list[str]
    exported_without: set[str]


@dataclass(frozen=True)
class Trained:
    """A training with and without MTP layers.

    Attributes:
        before, after: weights at its ends, with MTP layers, as Bridge exports them.
        alone: weights after the same training without.
        metrics: of each step, with and without.
        equal_logprobs: whether both gave the same log-probabilities, before and after.
        blind: whether the same weights came of batches that differ in their padding alone.
        skipped: of a step after an MTP weight had become infinite.
        unchanged: whether that step left all weights as they were.
    """

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    alone: dict[str, torch.Tensor]
    metrics: list[tuple[dict[str, float], dict[str, float]]]
    equal_logprobs: bool
    blind: bool
    skipped: float
    unchanged: bool


def two_ranks(
    rank: int,
    families: dict[str, str],
    lacking: Sequence[str],
    model_path: str,
    layouts: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    from tests.families.ranks import accept_families, forget

    accept_families()
    found: dict[str, Any] = {name: _train(model_path, layout) for name, layout in layouts.items()}
    for name, path in families.items():
        found[name] = _build(path)
        # Each model wants its own choice of attention kernels.
        forget(False)
    found["refused"] = [_refused(path) for path in lacking]
    return found


def _build(path: str) -> Built:
    from safetensors.torch import load_file

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    layout = MegatronLayout(tensor_parallel=2)
    built = build_megatron(path, layout, wrap_with_ddp=False, mtp_loss_scaling_factor=WEIGHT)
    given = load_file(f"{path}/model.safetensors")
    theirs = dict(built.bridge.export_hf_weights(built.model, cpu=True, show_progress=False))
    source = MegatronSource(built.bridge, built.model)
    sent, misc = {spec.name for spec in source.specs()}, source.fragments()[1]
    without = build_megatron(path, layout, wrap_with_ddp=False)
    return Built(
        set(theirs),
        sent,
        [name for name, tensor in theirs.items() if name in given and not torch.equal(tensor, given[name])],
        misc,
        [name for chunk in without.model for name, _ in chunk.named_parameters() if "mtp" in name],
        {n for n, _ in without.bridge.export_hf_weights(without.model, cpu=True, show_progress=False)},
    )


def _refused(path: str) -> str:
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    try:
        build_megatron(path, MegatronLayout(tensor_parallel=2), mtp_loss_scaling_factor=WEIGHT)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        leave_layout()
    return ""


def _policy(path: str, layout: dict[str, Any], weight: float) -> Any:
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.workers.trainers.megatron.model import MegatronLayout

    return MegatronPolicy(
        MegatronPolicyConfig(
            path,
            MegatronLayout(**layout),
            loss=scenes.loss_config(),
            # Megatron sums the norm by which it clips in an order that depends on all parameters of its buffers.
            optimizer=replace(scenes.ADAM, eps=1e-8, clip_grad=0.0),
            micro_batch=2,
            temperature=scenes.TEMPERATURE,
            dtype=torch.bfloat16,
            mtp_loss_scaling_factor=weight,
        )
    )


def _train(path: str, layout: dict[str, Any]) -> Trained:
    seen: list[tuple[Any, ...]] = []
    for weight, padding in ((WEIGHT, 0), (WEIGHT, 7), (0.0, 0)):
        policy = _policy(path, layout, weight)
        before = exported(policy)
        first = policy.compute_logprobs(scenes.plain_batch())
        batch = scenes.training_batch(first)
        tokens = batch.input_ids.clone()
        for row, end in enumerate(scenes.LENGTHS):
            tokens[row, end:] = padding
        batch = replace(batch, input_ids=tokens, lengths=None)
        metrics = [policy.train_step(batch) for _ in range(STEPS)]
        seen.append((before, exported(policy), metrics, first, policy.compute_logprobs(scenes.plain_batch())))
        if padding:
            blind = policy, batch
        leave_layout() if not padding else None
        if padding:
            skipped, unchanged = _overflow(*blind)
            leave_layout()
    (before, after, metrics, *logprobs), (_, other, *_), (_, alone, plain, *theirs) = seen
    return Trained(
        before,
        after,
        alone,
        list(zip(metrics, plain, strict=True)),
        all(torch.equal(a, b) for a, b in zip(logprobs, theirs, strict=True)),
        all(torch.equal(after[name], other[name]) for name in after),
        skipped,
        unchanged,
    )


def _overflow(policy: Any, batch: Any) -> tuple[float, bool]:
    for chunk in policy.model:
        for name, parameter in chunk.named_parameters():
            if name.endswith("eh_proj.weight"):
                parameter.data.fill_(torch.inf)
    before = exported(policy)
    told = policy.train_step(batch)
    after = exported(policy)
    return told["skipped"], all(torch.equal(before[name], after[name]) for name in before)
