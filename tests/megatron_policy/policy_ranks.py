"""What the ranks of these tests do: several policies one after another, as starting a rank takes long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

TEMPERATURE = 0.7
STEPS = 2
# Of the rows of a training batch; of 19 columns.
LENGTHS = (19, 12, 9, 17, 19)


@dataclass(frozen=True)
class Case:
    """One policy: a checkpoint in a layout."""

    model_path: str
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    distributed_optimizer: bool = True
    micro_batch: int = 2
    kl_coef: float = 0.0
    trimmed: bool = True
    recompute: dict[str, Any] | None = None
    # So large that Adam's step is smooth in the gradient: where a gradient is nearly 0, its rounding would
    # otherwise decide the step's sign.
    eps: float = 0.1
    lr_decay: str = "constant"


@dataclass(frozen=True)
class Report:
    """What one rank saw of a case. Plain values and arrays, since Megatron changes how torch pickles."""

    logprobs: Any
    trimmed_logprobs: Any
    metrics: list[dict[str, float]]
    weights: dict[str, Any]
    digests: list[str]
    later_logprobs: Any
    reference_logprobs: Any


def token_ids(rows: int = 5, tokens: int = 19) -> Any:
    """``[rows, tokens]`` int64; both counts are odd, so that every split must pad."""
    import torch

    return torch.randint(0, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def training_batch(logprobs: Any, reference: Any = None, *, trimmed: bool = True) -> Any:
    from tests.policy_scenes import batch_of

    return batch_of(token_ids(), 7, LENGTHS, logprobs, reference, trimmed=trimmed)


def make_policy(case: Case) -> Any:
    import torch

    from rlrefit.recipes.algorithms.losses import PolicyLossConfig
    from rlrefit.recipes.policy.base import AdamConfig
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, Recompute

    return MegatronPolicy(
        MegatronPolicyConfig(
            case.model_path,
            MegatronLayout(**case.layout),
            loss=PolicyLossConfig(aggregation="token", kl_coef=case.kl_coef),
            optimizer=AdamConfig(
                lr=1e-2,
                eps=case.eps,
                clip_grad=0.5,
                warmup_steps=1,
                lr_decay=case.lr_decay,
                lr_decay_steps=3,
                min_lr=4e-3,
            ),
            micro_batch=case.micro_batch,
            temperature=TEMPERATURE,
            dtype=getattr(torch, case.dtype),
            distributed_optimizer=case.distributed_optimizer,
            recompute=None if case.recompute is None else Recompute(**case.recompute),
        )
    )


def leave_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def digest(policy: Any) -> str:
    """Of this rank's parameters and of the optimizer's masters."""
    from tests.policy_scenes import digest_of

    tensors = [p for chunk in policy.model for p in chunk.parameters()]
    tensors += [p for group in policy._optimizer.param_groups for p in group["params"]]
    return digest_of(tensors)


def exported(policy: Any) -> dict[str, Any]:
    """The weights as a Hugging Face checkpoint would hold them, on each rank."""
    tensors = policy.bridge.export_hf_weights(policy.model, cpu=True, show_progress=False)
    return {name: tensor.float().numpy().copy() for name, tensor in tensors}


def train_all(rank: int, cases: dict[str, Case]) -> dict[str, Report]:
    """Log-probabilities, training steps and weights of each case."""
    reports = {}
    for name, case in cases.items():
        policy = make_policy(case)
        logprobs = policy.compute_logprobs(unmasked_batch())
        reference = policy.compute_reference_logprobs(unmasked_batch()) if case.kl_coef else None
        batch = training_batch(logprobs, reference, trimmed=case.trimmed)
        trimmed = policy.compute_logprobs(batch)
        # The warm-up starts at rate 0: the first step moves nothing.
        metrics, digests = [policy.train_step(batch)], [digest(policy)]
        for _ in range(STEPS):
            metrics.append(policy.train_step(batch))
            digests.append(digest(policy))
        reports[name] = Report(
            logprobs=logprobs.numpy(),
            trimmed_logprobs=trimmed.numpy(),
            metrics=metrics,
            weights=exported(policy),
            digests=digests,
            later_logprobs=policy.compute_logprobs(batch).numpy(),
            reference_logprobs=policy.compute_reference_logprobs(batch).numpy() if case.kl_coef else None,
        )
        leave_layout()
    return reports


def unmasked_batch() -> Any:
    import torch

    from rlrefit.recipes.policy.base import PolicyBatch

    return PolicyBatch(token_ids(), torch.zeros(token_ids().shape))


def two_ranks(
    rank: int, trained: dict[str, Case], resumed: dict[str, Case], other: Case, bad: dict[str, str], root: str
) -> dict[str, Any]:
    """All that needs two ranks; only rank 1's folder of ``bad`` is damaged."""
    from rlrefit.workers.trainers.megatron.hf_checkpoint import CheckpointMismatch
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from tests.policy_scenes import load_fails, resume

    def batch_of_it(policy: Any) -> Any:
        return training_batch(policy.compute_logprobs(unmasked_batch()))

    found: dict[str, Any] = {"trained": train_all(rank, trained), "resumed": {}}
    for name, case in resumed.items():
        make = partial(make_policy, case)
        found["resumed"][name] = resume(make, batch_of_it, digest, Path(root) / name, leave_layout)
    first = Path(root) / next(iter(resumed))
    found["other layout"] = load_fails(make_policy(other), digest, first, leave_layout)
    try:
        build_megatron(bad["bad" if rank == 1 else "good"], MegatronLayout(tensor_parallel=2))
    except CheckpointMismatch as error:
        found["one bad rank"] = str(error)
    build_megatron(other.model_path, MegatronLayout(tensor_parallel=2), wrap_with_ddp=False)
    try:
        build_megatron(other.model_path, MegatronLayout(), wrap_with_ddp=False)
    except ValueError as error:
        found["second layout"] = str(error)
    leave_layout()
    return found


def one_rank(rank: int, trained: dict[str, Case]) -> dict[str, Any]:
    """The same policies on a single rank, and what only a single rank needs."""
    import sys

    import torch

    from rlrefit.workers.trainers.megatron import cpu_standins
    from tests import loaded_megatron

    reports = train_all(rank, trained)
    cpu_standins.install()
    policy = make_policy(next(iter(trained.values())))
    rejected = []
    for batch in (unmasked_batch(), training_batch(policy.compute_logprobs(unmasked_batch()))):
        try:
            policy.train_step(replace(batch, loss_mask=batch.loss_mask * 0))
        except ValueError as error:
            rejected.append(str(error))
    try:
        policy.compute_reference_logprobs(unmasked_batch())
    except RuntimeError as error:
        rejected.append(str(error))
    try:
        torch.cuda.current_device()
        current_device = True
    except (AssertionError, RuntimeError):
        current_device = False
    changed = {
        "factories": (torch.zeros, torch.tensor) != loaded_megatron.FACTORIES,
        "tensor methods": (torch.Tensor.type, torch.Tensor.cuda) != loaded_megatron.METHODS,
        "modules": any(name.startswith("transformer_engine") for name in sys.modules),
        "current_device outside Megatron": current_device,
    }
    return {
        "trained": reports,
        "warnings": loaded_megatron.ANNOUNCED,
        "rejected": rejected,
        "changed": changed,
    }
