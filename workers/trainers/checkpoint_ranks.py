"""One look at a checkpoint on all ranks, before any of them begins to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..checkpoint_folder import checkpoint_folder
from .megatron.hf_checkpoint import CheckpointMismatch, check_checkpoint


def check_on_all_ranks(model_path: str | Path, weights: bool = True) -> tuple[Path, Any]:
    """The checkpoint's folder and, if it is to be loaded, its config; a collective.

    If any rank finds fault with its files, or can't fetch them, all raise, so that none waits.

    Raises:
        CheckpointMismatch: names the rank and all that is wrong.
    """
    folder, config, fault = Path(model_path), None, ""
    try:
        folder = checkpoint_folder(model_path, weights=weights)
        config = check_checkpoint(folder) if weights else None
    except (OSError, ValueError) as error:  # transformers' own complaints about a config among them
        fault = str(error)
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, text in enumerate(faults):
        if text:
            raise CheckpointMismatch(f"rank {rank}: {text}")
    return folder, config
