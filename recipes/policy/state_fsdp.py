"""Parameters and optimizer of a model under FSDP2 in ``torch.distributed.checkpoint``'s form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils._pytree import tree_map_only

from ...workers.trainers.durable import HashedFile, Written
from .state import CheckpointError, Files

_FOLDER = "fsdp"


class _HashedFiles(FileSystem):
    """The local file system; it keeps the hashes of the files that are written through it."""

    def __init__(self) -> None:
        self.written: dict[Path, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(Path(path)) as file:
            yield file
        self.written[Path(path)] = file.written

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path)] = self.written.pop(Path(path))


def save_sharded(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, tp_rank: int, trained_alone: bool = False
) -> Files:
    """Write all ranks' shards below ``folder``; a collective.

    Args:
        folder: of the checkpoint.
        model: under ``fully_shard``.
        optimizer: of its parameters.
        tp_rank: this rank's in transformers' own tensor parallelism, whose parts have the same names on all ranks.
        trained_alone: leave out parameters that are not trained; the checkpoint that the model was built of has them.

    Returns:
        The files that this rank wrote.
    """
    writer, files = dcp.FileSystemWriter(folder / _FOLDER), _HashedFiles()
    writer.fs = files
    options = StateDictOptions(ignore_frozen_params=trained_alone)
    dcp.save(_state(model, optimizer, tp_rank, options), storage_writer=writer)
    return {path.relative_to(folder).as_posix(): written for path, written in files.written.items()}


def load_sharded(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, tp_rank: int, trained_alone: bool = False
) -> None:
    """Undo :func:`save_sharded`, in place; a collective.

    Raises:
        CheckpointError: the files are missing or damaged, or are of another model; nothing was changed then.
    """
    # Read aside, in host memory: a load that fails half-way leaves the model as it was.
    options = StateDictOptions(cpu_offload=True, ignore_frozen_params=trained_alone, strict=not trained_alone)
    state = _state(model, optimizer, tp_rank, options)
    if any(parameter.device.type == "cpu" for parameter in model.parameters()):
        state = tree_map_only(torch.Tensor, torch.clone, state)
    try:
        dcp.load(state, checkpoint_id=folder / _FOLDER)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"{folder / _FOLDER} can't be read ({error}); resume from an earlier checkpoint. Nothing was changed"
        ) from error
    (own,) = state.values()
    set_state_dict(
        model,
        optimizer,
        model_state_dict=own["model"],
        optim_state_dict=own["optimizer"],
        options=options,
    )


def _state(
    model: Any, optimizer: torch.optim.Optimizer, tp_rank: int, options: StateDictOptions
) -> dict[str, Any]:
    _fill(optimizer)
    weights, steps = get_state_dict(model, optimizer, options=options)
    return {f"tp_{tp_rank}": {"model": weights, "optimizer": steps}}


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that had no gradient yet the state that AdamW begins with, as the reading side has it of all."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
