"""Groups whose ranks are threads of the test's own process, kept for many transfers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup


@cache
def _loop() -> Any:
    return ProcessGroupGloo.create_default_device()


class _Rank(TorchGroup):
    """Shares one loop of gloo with all others of this process: each of its own would wake a hundred times a second."""

    def _make(self, store: Store) -> Any:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [_loop()], timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(store, self.rank, self.size, options)


class GroupWorld:
    """``size`` ranks of one gloo group; ``with`` it, and call :meth:`run` any number of times."""

    def __init__(self, size: int, timeout_s: float = 20.0):
        self.size = size
        self._timeout_s = timeout_s

    def __enter__(self) -> GroupWorld:
        store = HashStore()
        self._pool = ThreadPoolExecutor(self.size)

        def connect(rank: int) -> Group:
            return _Rank.open(
                store, "world", rank, self.size, torch.device("cpu"), self._timeout_s, lambda stage: None
            )

        self.groups = list(self._pool.map(connect, range(self.size)))
        return self

    def run(self, body: Callable[[int, Group], Any]) -> list[Any]:
        """What ``body(rank, group)`` returns on each rank, or the exception that ended it."""

        def call(rank: int) -> Any:
            try:
                return body(rank, self.groups[rank])
            except Exception as error:
                return error

        return list(self._pool.map(call, range(self.size)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        list(self._pool.map(lambda group: group.close(), self.groups))
        self._pool.shutdown()
        self.groups = []
