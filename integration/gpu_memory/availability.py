"""Whether the ranks of a refit world can write into each other's GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..control.world import host_identity
from ..errors import RefitMismatch
from .driver import missing
from .memory import device_uuid, process_name


def facts(device: torch.device) -> dict[str, Any]:
    """What this rank has to tell for :func:`availability`; plain data.

    Args:
        device: of its parameters.
    """
    if device.type != "cuda":
        return {"host": host_identity(), "lacks": "its parameters are not on a GPU"}
    visible = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    ours = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return {
        "host": host_identity(),
        "lacks": missing(),
        "device": device_uuid(ours),
        "process": process_name(),
        "visible": [device_uuid(other) for other in visible],
        "reaches": [
            device_uuid(other)
            for other in visible
            if other == ours or torch.cuda.can_device_access_peer(ours, other)
        ],
    }


def availability(told: Sequence[object], train_ranks: int) -> tuple[bool, str]:
    """Whether ``ipc`` can join these ranks, and why or why not, as a clause for ``transport: auto``.

    Memory of pools without shareable handles shows only when the transport binds.

    Args:
        told: the :func:`facts` of all ranks, trainers first; nothing in it is trusted.
        train_ranks: how many of them are trainers.

    Raises:
        RefitMismatch: what a rank told can't be read.
    """
    ranks = [_read(one, rank) for rank, one in enumerate(told)]
    return _joinable(ranks, train_ranks)


def _joinable(told: Sequence[dict[str, Any]], train_ranks: int) -> tuple[bool, str]:
    for rank, one in enumerate(told):
        if one["lacks"]:
            return False, f"refit rank {rank}: {one['lacks']}"
    hosts = {one["host"] for one in told}
    if len(hosts) > 1:
        return False, f"the ranks are on {len(hosts)} hosts"
    for source in range(train_ranks):
        for destination in range(train_ranks, len(told)):
            peer = told[destination]["device"]
            # CUDA can open the memory of a GPU that a process does not see; connecting tells whether it does.
            if peer in told[source]["visible"] and peer not in told[source]["reaches"]:
                return (
                    False,
                    f"the GPU of refit rank {source} can't reach the GPU of refit rank {destination}",
                )
    return True, "all ranks are on one host and their GPUs reach each other"


def _read(one: object, rank: int) -> dict[str, Any]:
    if isinstance(one, dict) and isinstance(one.get("host"), str) and isinstance(one.get("lacks"), str):
        lists = [one.get("visible"), one.get("reaches")]
        if one["lacks"] or (isinstance(one.get("device"), str) and all(isinstance(x, list) for x in lists)):
            return one
    raise RefitMismatch(
        f"refit rank {rank} describes its GPU in a form that can't be read; nothing was written. Do all ranks run the "
        "same rlrefit?",
        stage="handshake",
        rank=rank,
    )
