"""One thread for all of a process's groups over gloo: each would have a loop of its own, which wakes a hundred times a second.

Megatron makes dozens of groups on each rank. Processes of the servers come with this; it changes who reads the sockets,
and nothing of what goes through them.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

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


distributed_c10d.ProcessGroupGloo = _OnOneDevice
