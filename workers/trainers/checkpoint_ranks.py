"""One look at a layout and a checkpoint on all ranks, before any of them begins to build the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ..checkpoint_folder import checkpoint_folder, copy_own_code
from .megatron.hf_checkpoint import CheckpointMismatch, check_checkpoint


class Layout(Protocol):
    """How a model is spread over the ranks."""

    def violations(self, world_size: int) -> list[str]:
        """What is impossible with so many ranks, one sentence each."""


def check_on_all_ranks(
    model_path: str | Path,
    layout: Layout,
    weights: bool = True,
    trust_remote_code: bool = False,
    needs_model: bool = False,
) -> tuple[Path, Any]:
    """The checkpoint's folder and, if it is to be loaded, its config; a collective.

    If any rank finds fault with its files, or can't fetch them, all raise, so that none waits.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: the layout does not fit the ranks.
        CheckpointMismatch: names the rank and all that is wrong.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "a model is built over ranks of torch.distributed; call init_process_group (nccl, or gloo on CPUs) on each rank"
        )
    violations = layout.violations(dist.get_world_size())
    if violations:
        raise ValueError(f"the layout {layout} is not possible: " + "; ".join(violations))
    folder, config, fault = Path(model_path), None, ""
    try:
        folder = checkpoint_folder(model_path, weights=weights)
        if trust_remote_code:
            copy_own_code(model_path)
        config = check_checkpoint(folder, trust_remote_code, needs_model) if weights else None
    except Exception as error:  # code that a checkpoint brings may raise anything, and the other ranks wait
        told = isinstance(
            error, OSError | ValueError
        )  # transformers' own complaints about a config among them
        fault = str(error) if told else f"{type(error).__name__}: {error}"
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, text in enumerate(faults):
        if text:
            raise CheckpointMismatch(f"rank {rank}: {text}")
    return folder, config
