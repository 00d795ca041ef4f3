"""Which kind of group joins the ranks of an epoch, and why; and how one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import torch

from ..control.channel import Channel
from ..errors import RefitError, RefitMismatch
from ..gpu_memory.availability import GpuFacts, availability
from .device_group import MOST_BUCKET_BYTES as MOST_ON_DEVICE
from .device_group import MOST_SHARED_BYTES, DeviceGroup
from .group import Group
from .host_group import MOST_BUCKET_BYTES as MOST_ON_HOST
from .host_group import HostGroup
from .torch_group import TorchGroup


@dataclass(frozen=True)
class GroupChoice:
    """What carries the bytes of a group.

    Attributes:
        kind: ``network`` (NCCL or gloo), ``device`` (buckets in GPU memory that the ranks map into each other) or
            ``host`` (buckets in host memory).
        why: why it is shared memory, or why it need not be.
        how: where the buckets lie, and why there; empty for the network.
        most_bucket_bytes: a larger bucket would be no faster.
    """

    kind: str
    why: str
    how: str = ""
    most_bucket_bytes: int = 0

    @property
    def reason(self) -> str:
        """Why this one."""
        return f"{self.why}; {self.how}" if self.how else self.why


def without_nccl(told: Sequence[GpuFacts]) -> str:
    """Why NCCL can join no group of these ranks, as a sentence; empty if it can.

    It takes no two ranks of one GPU, and only ranks of one release (``initTransportsRank`` in its ``init.cc``).

    Args:
        told: by all ranks.
    """
    return _shared_gpu(told) or _releases(told)


def _shared_gpu(told: Sequence[GpuFacts]) -> str:
    devices = [one.device for one in told]
    for (a, first), (b, second) in combinations(enumerate(devices), 2):
        if first and first == second:
            return f"refit ranks {a} and {b} share a GPU, and NCCL takes no two ranks of one"
    return ""


def _releases(told: Sequence[GpuFacts]) -> str:
    on_gpus = [(rank, one.nccl) for rank, one in enumerate(told) if one.device]
    for rank, release in on_gpus[1:]:
        first, expected = on_gpus[0]
        if release != expected:
            return f"NCCL is {expected} on refit rank {first} and {release} on refit rank {rank}, and joins ranks of one release alone"
    return ""


def choose_group(told: Sequence[GpuFacts], asked: bool) -> GroupChoice:
    """What joins all ranks.

    Args:
        told: by all ranks.
        asked: whether to use shared memory even where the network would do.

    Raises:
        RefitError: the ranks need memory that all can reach, and are on several hosts.
    """
    obstacle = without_nccl(told)
    if not obstacle and not asked:
        return GroupChoice("network", "the network joins all ranks")
    why = obstacle or "the engine colocated_ipc was asked for"
    hosts = {one.host for one in told}
    if len(hosts) > 1:
        remedy = (
            "Make a refit world for each host, or give every rank a GPU of its own"
            if asked or _shared_gpu(told)
            else "Install one release of nvidia-nccl in both environments; torch takes the one that is installed"
        )
        raise RefitError(
            f"{why}, so they need memory that all ranks can reach, but the ranks are on {len(hosts)} hosts; nothing was "
            f"written. {remedy}",
            stage="process group",
        )
    apart = _shared_process(told) or _obstacle(told)
    if apart:
        how = f"buckets in host memory, since {apart}"
        return GroupChoice("host", why, how, MOST_ON_HOST)
    how = "buckets in GPU memory, by CUDA IPC"
    return GroupChoice("device", why, how, MOST_SHARED_BYTES if _shared_gpu(told) else MOST_ON_DEVICE)


def choose_delta_groups(told: Sequence[GpuFacts], wire: GroupChoice) -> tuple[GroupChoice, ...]:
    """What may join ranks that send each other blocks of sparse refits beside one-sided writes, the best first.

    Copy engines between the GPUs of a host, where all can reach each other: NCCL's kernels would wait until those that
    pack a section have left the GPU.

    Args:
        told: by all ranks, which are on one host.
        wire: what joins them otherwise.
    """
    best = choose_group(told, True)
    if best.kind != "device":
        return (wire,)
    if wire == best or (wire.kind == "network" and cumem_difference(told)):
        return (best,)
    return best, wire


def _shared_process(told: Sequence[GpuFacts]) -> str:
    """Why buckets in GPU memory would hang: streams wait for counts there, and those of one process may share a hardware
    queue, where a rank's count would stand behind its peer's wait for it. Empty if each rank is a process."""
    processes = [one.process for one in told]
    for (a, first), (b, second) in combinations(enumerate(processes), 2):
        if first and first == second:
            return f"refit ranks {a} and {b} are in one process, whose streams may wait for each other in one hardware queue"
    return ""


def _obstacle(told: Sequence[GpuFacts]) -> str:
    """Why some rank can't map another one's GPU memory; empty if all can. Buckets are written both ways."""
    for a, b in permutations(range(len(told)), 2):
        able, reason = availability([told[a], told[b]], 1)
        if not able:
            return f"refit rank {a} can't map GPU memory of refit rank {b} (of these two, {reason})"
    return ""


def cumem_difference(told: Sequence[GpuFacts]) -> str:
    """Ranks of one host whose NCCL would hand each other memory in different ways, as a clause; empty if there are none.

    NCCL would fail in its first exchange, with no more words than "invalid argument". Unset, it takes cuMem where the driver has it
    (``ncclIsCuMemSupported`` in its ``misc/cudawrap.cc``), as mapped memory needs.

    Args:
        told: by all ranks.
    """
    ranks = [(rank, one) for rank, one in enumerate(told) if one.device and not one.lacks]
    for (a, first), (b, second) in combinations(ranks, 2):
        if first.host == second.host and (first.nccl_cumem == "0") != (second.nccl_cumem == "0"):
            values = " and ".join(
                f"{one.nccl_cumem or 'unset'} on refit rank {rank}" for rank, one in ((a, first), (b, second))
            )
            return f"NCCL_CUMEM_ENABLE is {values}, of one host"
    return ""


def require_one_cumem(told: Sequence[GpuFacts]) -> None:
    """Refuse ranks that :func:`cumem_difference` finds.

    Raises:
        RefitMismatch: ``NCCL_CUMEM_ENABLE`` is off on one of them alone.
    """
    difference = cumem_difference(told)
    if difference:
        raise RefitMismatch(
            f"{difference}, so that NCCL could not connect them; nothing was written. SGLang, and "
            "verl for its rollout servers, set 0 for their own processes: start all ranks with the same value",
            stage="process group",
        )


def open_group(
    channel: Channel,
    choice: GroupChoice,
    name: str,
    place: tuple[int, int],
    device: torch.device,
    lanes: int,
    bucket_bytes: int,
) -> Group:
    """Open a group of the chosen kind; all its ranks at the same time.

    Args:
        channel: of the epoch.
        choice: the same on all ranks.
        name: of the group, unique in the epoch.
        place: rank in the group, and its size.
        device: of the tensors that will travel.
        lanes: exchanges that can run at the same time.
        bucket_bytes: most that a rank's buckets take in shared memory, for each direction and lane and twice over.

    Raises:
        RefitError: it could not be made.
    """
    rank, size = place
    common = (channel.store, name, rank, size, device, channel.timeout_s, channel.check_abort, lanes)
    part = bucket_bytes // max(1, size - 1)
    if choice.kind == "device":
        return DeviceGroup(*common, min(part, choice.most_bucket_bytes))
    if choice.kind == "host":
        return HostGroup(*common, min(part, choice.most_bucket_bytes))
    return TorchGroup.open(*common, channel.address)
