"""What a process and its GPU hold, for both sides of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
Memory = dict[str, int]


def memory(device: torch.device) -> Memory:
    """Bytes: ``rss`` of this process; on a GPU also torch's ``allocated``, ``reserved`` and ``peak``, and ``used``.

    ``used`` is what nvidia-smi shows of the GPU: all processes, CUDA's contexts and NCCL's buffers too.
    """
    with open("/proc/self/statm") as file:
        found = {"rss": int(file.read().split()[1]) * _PAGE}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "used": total - free,
        }
    return found


def restart_peak(device: torch.device) -> None:
    """Let ``peak`` count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def largest(answers: Iterable[Memory]) -> Memory:
    """Of each figure, the largest of several ranks."""
    found: Memory = {}
    for answer in answers:
        for name, nbytes in answer.items():
            found[name] = max(found.get(name, 0), nbytes)
    return found
