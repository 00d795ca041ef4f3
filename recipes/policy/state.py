"""One rank's training state in one file, such that training goes on bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...workers.trainers.durable import HashedFile, Written
from ...workers.trainers.megatron.native_fp8 import follow_native_state, is_native, native_state

# By their paths in a checkpoint folder, with / between names.
Files = dict[str, Written]


class CheckpointError(RuntimeError):
    """A saved training state is missing, damaged, or of another layout."""


def _rank_file(folder: str | Path, rank: int) -> Path:
    """Where ``rank`` keeps its state in a checkpoint folder."""
    return Path(folder) / f"rank_{rank:05d}.pt"


def _tensors(model: list[Any], trained_alone: bool) -> Iterator[tuple[str, Tensor]]:
    for index, chunk in enumerate(model):
        kept = ((n, p) for n, p in chunk.named_parameters() if p.requires_grad or not trained_alone)
        for name, tensor in (*kept, *chunk.named_buffers()):
            if is_native(tensor):
                for part, value in native_state(tensor).items():
                    yield f"{index}.{name}.{part}", value
            else:
                yield f"{index}.{name}", tensor


def frozen_digest(model: list[Any]) -> str:
    """Of the values of this rank's frozen parameters, which a checkpoint of adapters leaves out: it is of these alone."""
    found = hashlib.sha256()
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                continue
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            total = own.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)
            found.update(f"{index}.{name} {int(total)}\n".encode())
    return found.hexdigest()


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch-like optimizers inside Megatron's: their parameters are this rank's float32 masters.

    Megatron keeps one for dense and one for expert parameters; under the distributed optimizer the masters
    are this data-parallel rank's shards. A rank without parameters of a kind has none. The hybrid optimizer
    (``optimizer_cpu_offload``) consists of one on the host and one on the GPU.
    """
    wrapped = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [each.optimizer for each in wrapped if getattr(each, "optimizer", None) is not None]
    return [part for inner in found for part in getattr(inner, "sub_optimizers", [inner])]


def _plain_state(inner: Any) -> dict[str, Any]:
    """The optimizer's state without what the hybrid one adds: its own settings, classes among them, and masters."""
    state = inner.state_dict()
    groups = [{k: v for k, v in group.items() if not isinstance(v, type)} for group in state["param_groups"]]
    values = {
        number: {name: value for name, value in values.items() if name != "master_param"}
        for number, values in state["state"].items()
    }
    return {"state": values, "param_groups": groups}


def _load_plain_state(inner: Any, saved: dict[str, Any]) -> None:
    present = inner.state_dict()["param_groups"]
    groups = [live | kept for live, kept in zip(present, saved["param_groups"], strict=True)]
    inner.load_state_dict({"state": saved["state"], "param_groups": groups})


def _masters(inner: Any) -> list[Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def training_state(
    model: list[Any], optimizer: Any, scheduler: Any, trained_alone: bool = False
) -> dict[str, Any]:
    """Parameters, buffers, masters, moments, schedule and random states of this rank.

    Tensors of the state share storage with the live ones: write it out before the next step. ``trained_alone`` leaves out parameters
    that are not trained; the checkpoint that the model was built of has them.
    """
    return {
        "model": {name: tensor.detach() for name, tensor in _tensors(model, trained_alone)},
        "optimizers": [
            {"state": _plain_state(inner), "masters": [master.detach() for master in _masters(inner)]}
            for inner in _inner_optimizers(optimizer)
        ],
        "scheduler": scheduler.state_dict(),
        "random": {**random_state(), "megatron": _megatron_random().get_states()},
    }


def restore_training_state(
    state: dict[str, Any], model: list[Any], optimizer: Any, scheduler: Any, trained_alone: bool = False
) -> None:
    """Undo :func:`training_state`, in place.

    Raises:
        CheckpointError: names or shapes differ from the model's; nothing was changed then.
    """
    live = dict(_tensors(model, trained_alone))
    inners = _inner_optimizers(optimizer)
    _check(state, live, [_masters(inner) for inner in inners])
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(state["model"][name])
        if native := [weight for chunk in model for weight in chunk.parameters() if is_native(weight)]:
            follow_native_state(native)
        for inner, saved in zip(inners, state["optimizers"], strict=True):
            _load_plain_state(inner, saved["state"])
            for master, value in zip(_masters(inner), saved["masters"], strict=True):
                master.copy_(value)
    scheduler.load_state_dict(state["scheduler"])
    set_random_state(state["random"])
    _megatron_random().set_states(state["random"]["megatron"])


def _check(state: dict[str, Any], live: dict[str, Tensor], masters: list[list[Tensor]]) -> None:
    saved = state["model"]
    for name in live.keys() | saved.keys():
        ours = list(live[name].shape) if name in live else None
        theirs = list(saved[name].shape) if name in saved else None
        if ours != theirs:
            raise CheckpointError(
                f"parameter {name} has shape {ours} in the model and {theirs} in the checkpoint (None: it is "
                "missing); the checkpoint is of another model. Nothing was changed"
            )
    shapes = [[list(master.shape) for master in group] for group in masters]
    saved_shapes = [[list(master.shape) for master in each["masters"]] for each in state["optimizers"]]
    if shapes != saved_shapes:
        raise CheckpointError(
            "the optimizer's masters are cut otherwise than in the checkpoint: the data-parallel size or "
            "distributed_optimizer differs. Resume with the settings that saved it. Nothing was changed"
        )


def _megatron_random() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def random_state() -> dict[str, Any]:
    """The random states of this process, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Undo :func:`random_state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def write_rank_state(folder: str | Path, rank: int, payload: dict[str, Any]) -> Files:
    """Write ``payload`` as this rank's file, and return what it holds; a file of that name is complete or not there."""
    path = _rank_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with HashedFile(partial) as file:
        torch.save(payload, file)
    partial.replace(path)
    return {path.name: file.written}


def read_rank_state(folder: str | Path, rank: int) -> dict[str, Any]:
    """Read this rank's file; nothing but tensors and plain values is unpickled.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    path = _rank_file(folder, rank)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} has no state in {folder} ({path.name} is missing): it was saved by fewer ranks, or on "
            "a file system that this host does not see"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} can't be read ({error}); resume from an earlier checkpoint") from error
