"""Handles of tensors in host memory, by torch's own reductions through file descriptors, in the form of CUDA's.

Where there is no GPU, other processes reach the sender's memory by them: the same bytes, no copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

from rlrefit.workers.engines.trtllm.payload import APPROVED

# Imports of these handles, for an extension that approves them.
APPROVED_HERE = {
    **APPROVED,
    __name__: ("rebuild_host_tensor",),
    "multiprocessing.resource_sharer": ("DupFd",),
}


def host_handle(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    _, (kind, descriptor, nbytes) = reductions.reduce_storage(storage)
    layout = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset())
    return rebuild_host_tensor, (*layout, kind, tensor.dtype, 0, descriptor, nbytes, 0, False)


def rebuild_host_tensor(
    cls: type, size: Any, stride: Any, offset: int, kind: Any, dtype: torch.dtype, device: int, *rest: Any
) -> torch.Tensor:
    descriptor, nbytes, _, _ = rest
    assert cls is torch.Tensor
    assert isinstance(device, int), "the receiver puts its own device here"
    storage = reductions.rebuild_storage_fd(kind, descriptor, nbytes)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return torch._utils._rebuild_tensor(typed, offset, size, stride)


def cuda_shaped_handle(tensor: torch.Tensor) -> Any:
    """As ``reduce_tensor`` of a CUDA tensor: the same function, arguments of the same types in the same order."""
    device, handle, nbytes, offset = 0, b"\x01" * 66, tensor.untyped_storage().nbytes(), 0
    counter, counter_offset, event = b"\x02" * 32, 7, b"\x03" * 64
    layout = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset())
    memory = (torch.storage.TypedStorage, tensor.dtype, device, handle, nbytes, offset, tensor.requires_grad)
    return reductions.rebuild_cuda_tensor, (*layout, *memory, counter, counter_offset, event, True)
