"""Calls of the CUDA driver, through NVIDIA's ``cuda-bindings`` (which torch for CUDA depends on)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class DriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        status: the driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, function: str, status: str):
        super().__init__(f"{function} says {status}")
        self.status = status


@cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``, loaded on first use. Without GPUs it is not needed.

    Raises:
        ImportError: cuda-bindings is not installed.
    """
    return importlib.import_module("cuda.bindings.driver")


def call(function: str, *args: Any) -> Any:
    """Call a driver function and return its result: none, one value, or a tuple of values.

    Raises:
        DriverError: the driver returned an error.
    """
    status, *values = getattr(driver(), function)(*args)
    if status != driver().CUresult.CUDA_SUCCESS:
        raise DriverError(function, status.name)
    return values[0] if len(values) == 1 else tuple(values)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Let driver calls inside work on ``device``, whatever thread makes them.

    The driver needs a context that is current in the thread. torch's guard sets none if the device is the thread's already,
    and the first device is so in every new thread. Engines call from their own threads.
    """
    with torch.cuda.device(device):
        if not int(call("cuCtxGetCurrent")):
            # Any call of the runtime makes the device's context current in the thread.
            torch.cuda.mem_get_info(device)
        yield


def missing() -> str:
    """Why the driver can't be called from this process; empty if it can."""
    try:
        driver()
    except ImportError as error:
        return f"cuda-bindings can't be imported ({error}); pip install 'cuda-bindings>=13,<14'"
    return ""
