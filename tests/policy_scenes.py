"""What tests of both trainers' policies start from: weights that tell, and a batch that is cut in every way."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlrefit.recipes.policy.base import CheckpointError
from rlrefit.recipes.policy.batch import PolicyBatch
from rlrefit.workers.trainers.durable import Written


def spread(model: torch.nn.Module, factor: float) -> None:
    """Widen the weights from what they begin with, so that a wrong shard or head order shows in the probabilities."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(factor)


def batch_of(
    ids: torch.Tensor,
    first: int,
    lengths: Sequence[int],
    logprobs: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    trimmed: bool = True,
) -> PolicyBatch:
    """Completions that differ in length, and ratios that differ from 1.

    Args:
        ids: ``[N, S]``.
        first: column of the completions' first token.
        lengths: of the rows, with their prompts.
        logprobs: ``[N, S]``, which the old ones are near.
        reference: ``[N, S]``.
        trimmed: the batch tells the lengths.
    """
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(ids.shape)
    for row, end in enumerate(lengths):
        mask[row, first:end] = 1
    noise = torch.randn(ids.shape, generator=generator) * 0.05
    return PolicyBatch(
        input_ids=ids,
        loss_mask=mask,
        advantages=torch.randn(len(ids), generator=generator),
        old_logprobs=logprobs + noise,
        ref_logprobs=reference,
        lengths=torch.tensor(lengths) if trimmed else None,
    )


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Of their bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def resume(
    make: Callable[[], Any],
    batch_of_it: Callable[[Any], PolicyBatch],
    digest: Callable[[Any], str],
    folder: Path,
    leave: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train on after a save, and once more in a new policy after a load; then steps that are left out. A collective.

    Args:
        leave: called where a policy is no longer needed.
    """
    policy = make()
    batch = batch_of_it(policy)
    policy.train_step(batch)
    report: dict[str, Any] = {"saved": _saved_files(policy, folder)}

    def go_on(trained: Any) -> tuple[Any, ...]:
        steps = [trained.train_step(batch) for _ in range(2)]
        randoms = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        return steps, digest(trained), trained.step, randoms

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
    in_a_row = policy.config.max_skipped_steps
    found = {"skipped": [policy.train_step(bad)["skipped"] for _ in range(in_a_row)]}
    found["unchanged"] = digest(policy) == before
    found["next step"] = policy.train_step(batch), digest(policy)
    found["skipped again"] = [policy.train_step(bad)["skipped"] for _ in range(in_a_row)]
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
        assert found["skipped"] == found["skipped again"] == [1.0, 1.0, 1.0]
        assert found["unchanged"]
        # As if nothing had been.
        assert found["next step"] == report["next step"]
        assert found["ended"]
