"""One thread for all of a process's groups over gloo, and objects gathered in one collective.

Each group would have a loop of its own, which wakes a hundred times a second, and Megatron makes dozens of groups on each rank.
torch gathers the objects' sizes first, and Bridge gathers objects for each parameter: both, with what ranks do to wait for one
another, take three times as long as one collective. Processes of the servers come with this.
"""

from __future__ import annotations

import functools
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Gloo = distributed_c10d.ProcessGroupGloo


@functools.cache
def _device() -> Any:
    """The loop of this process; not before the fork, which no thread outlives."""
    return Gloo.create_default_device()


class _OnOneDevice(Gloo):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = Gloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


# Of a pickled object's size, and of what goes at once behind it. Where an object is larger, torch gathers all of them.
_SIZE, _ROOM = 8, 4096
_gather_objects = distributed_c10d.all_gather_object


def _small_objects(own: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """The objects of all ranks by rank; None, on all of them, where one is too large."""
    data = pickle.dumps(own)
    sent = bytearray(len(data).to_bytes(_SIZE, "little") + data[:_ROOM]).ljust(_SIZE + _ROOM, b"\0")
    gathered = [torch.empty(len(sent), dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, torch.frombuffer(sent, dtype=torch.uint8), group=group)
    found = [tensor.numpy().data for tensor in gathered]
    if max(int.from_bytes(one[:_SIZE], "little") for one in found) > _ROOM:
        return None
    return [pickle.loads(one[_SIZE:]) for one in found]  # which ends where its object does


def _all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    over_gloo = not distributed_c10d._rank_not_in_group(group) and dist.get_backend(group) == "gloo"
    found = _small_objects(obj, group) if over_gloo else None
    if found is None:
        _gather_objects(object_list, obj, group)
    else:
        object_list[: len(found)] = found


distributed_c10d.ProcessGroupGloo = _OnOneDevice
distributed_c10d.all_gather_object = dist.all_gather_object = _all_gather_object
