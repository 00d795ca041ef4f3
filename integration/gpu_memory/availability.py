"""Whether the ranks of a refit world can write into each other's GPU memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..control.world import host_identity
from .driver import missing
from .memory import device_uuid, process_name


@dataclass(frozen=True)
class GpuFacts:
    """What a rank tells about its GPU before any group or transport is chosen.

    Attributes:
        host: identity of its host.
        lacks: why other ranks can't map its memory, as a clause; empty if they can.
        device: UUID of the GPU. On a CPU this and all below are empty.
        process: name of the process.
        visible: UUIDs of the GPUs that the process sees.
        reaches: those of them whose memory its GPU can access.
        nccl: release of the NCCL that its torch runs, 2.28.9 for example.
        nccl_cumem: its NCCL_CUMEM_ENABLE, empty if that is unset.
    """

    host: str
    lacks: str = ""
    device: str = ""
    process: str = ""
    visible: tuple[str, ...] = ()
    reaches: tuple[str, ...] = ()
    nccl: str = ""
    nccl_cumem: str = ""

    def __post_init__(self) -> None:
        if not self.lacks and not self.device:
            raise ValueError("it names no GPU and nothing that is lacking")


def nccl_release(device: torch.device) -> str:
    """Release of the NCCL that this process would join ranks with; empty on a CPU."""
    return ".".join(str(part) for part in torch.cuda.nccl.version()) if device.type == "cuda" else ""


def facts(device: torch.device) -> GpuFacts:
    """The facts of this rank; ``device`` holds its parameters."""
    if device.type != "cuda":
        return GpuFacts(host_identity(), "its parameters are not on a GPU")
    visible = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    ours = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return GpuFacts(
        host_identity(),
        missing(),
        device_uuid(ours),
        process_name(),
        tuple(device_uuid(other) for other in visible),
        tuple(
            device_uuid(other)
            for other in visible
            if other == ours or torch.cuda.can_device_access_peer(ours, other)
        ),
        nccl_release(ours),
        os.environ.get("NCCL_CUMEM_ENABLE", ""),
    )


def availability(told: Sequence[GpuFacts], train_ranks: int) -> tuple[bool, str]:
    """Whether ``ipc`` can join these ranks, and the reason, as a clause for ``transport: auto``.

    Memory pools without shareable handles are found later, when the transport binds.

    Args:
        told: by all ranks, trainers first.
        train_ranks: how many of them are trainers.
    """
    for rank, one in enumerate(told):
        if one.lacks:
            return False, f"refit rank {rank}: {one.lacks}"
    hosts = {one.host for one in told}
    if len(hosts) > 1:
        return False, f"the ranks are on {len(hosts)} hosts"
    for source in range(train_ranks):
        for destination in range(train_ranks, len(told)):
            peer = told[destination].device
            # CUDA may open the memory of a GPU that a process does not see. Only connecting shows whether it can.
            if peer in told[source].visible and peer not in told[source].reaches:
                return (
                    False,
                    f"the GPU of refit rank {source} can't reach the GPU of refit rank {destination}",
                )
    return True, "all ranks are on one host and their GPUs reach each other"
