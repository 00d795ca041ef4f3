"""What the ranks of these tests do: several policies one after another, as starting a rank takes long."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
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
    """As :func:`tests.policy_scenes.batch_of`."""
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
    """Of the bytes of this rank's parameters and of the optimizer's masters."""
    import torch

    found = hashlib.sha256()
    tensors = [p for chunk in policy.model for p in chunk.parameters()]
    tensors += [p for group in policy._optimizer.param_groups for p in group["params"]]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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


def resume_all(rank: int, cases: dict[str, Case], root: str) -> dict[str, dict[str, Any]]:
    """Train on after a save, and once more in a new policy after a load."""
    import numpy as np
    import torch

    from tests.policy_scenes import saved_files, skip_steps

    reports = {}
    for name, case in cases.items():
        folder = Path(root) / name
        policy = make_policy(case)
        batch = training_batch(policy.compute_logprobs(unmasked_batch()))
        policy.train_step(batch)
        policy.train_step(batch)
        saved = saved_files(policy, folder)
        through = [policy.train_step(batch) for _ in range(2)], digest(policy), policy.step
        randoms = torch.rand(3).tolist(), np.random.rand(3).tolist()
        next_step = policy.train_step(batch), digest(policy)

        leave_layout()
        resumed = make_policy(case)
        before = digest(resumed)
        resumed.load(folder)
        again = [resumed.train_step(batch) for _ in range(2)], digest(resumed), resumed.step
        reports[name] = {
            "through": through,
            "again": again,
            "before": before,
            "randoms": (randoms, (torch.rand(3).tolist(), np.random.rand(3).tolist())),
            "skipped": skip_steps(resumed, batch, digest),
            "next step": next_step,
            "saved": saved,
        }
        leave_layout()
    return reports


def load_fails(rank: int, case: Case, folder: str) -> tuple[str, bool]:
    """The text of the error, and whether the policy stayed as it was."""
    from rlrefit.recipes.policy.base import CheckpointError

    policy = make_policy(case)
    before = digest(policy)
    try:
        policy.load(folder)
    except CheckpointError as error:
        text = str(error)
    else:
        text = ""
    leave_layout()
    return text, digest(policy) == before


def two_ranks(
    rank: int, trained: dict[str, Case], resumed: dict[str, Case], other: Case, bad: dict[str, str], root: str
) -> dict[str, Any]:
    """All that needs two ranks."""
    return {
        "trained": train_all(rank, trained),
        "resumed": resume_all(rank, resumed, root),
        "other layout": load_fails(rank, other, f"{root}/{next(iter(resumed))}"),
        "one bad rank": build_fails(rank, bad),
        "second layout": second_layout(rank, other),
    }


def build_fails(rank: int, paths: dict[str, str]) -> str:
    """The error where only rank 1's folder is damaged."""
    from rlrefit.workers.trainers.megatron.hf_checkpoint import CheckpointMismatch
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    try:
        build_megatron(paths["bad" if rank == 1 else "good"], MegatronLayout(tensor_parallel=2))
    except CheckpointMismatch as error:
        return str(error)
    return ""


def second_layout(rank: int, case: Case) -> str:
    """The error of a second model in another layout than the first."""
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    build_megatron(case.model_path, MegatronLayout(tensor_parallel=2), wrap_with_ddp=False)
    try:
        build_megatron(case.model_path, MegatronLayout(), wrap_with_ddp=False)
    except ValueError as error:
        return str(error)
    finally:
        leave_layout()
    return ""


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
        answer = "answers"
    except (AssertionError, RuntimeError):
        answer = "raises"
    outside = {
        "same factories": (torch.zeros, torch.tensor) == loaded_megatron.FACTORIES,
        "same tensor methods": (torch.Tensor.type, torch.Tensor.cuda) == loaded_megatron.METHODS,
        "transformer_engine modules": [name for name in sys.modules if name.startswith("transformer_engine")],
        "current_device outside Megatron": answer,
    }
    return {"trained": reports, "warnings": loaded_megatron.ANNOUNCED, "rejected": rejected, "torch": outside}
