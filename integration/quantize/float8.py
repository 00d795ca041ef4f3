"""Float8 tensors as bytes, and back.

NCCL's bindings, pickles of IPC handles and restricted unpicklers do not know float8, so it travels as
``uint8`` with the dtype's name beside it. Both directions are views: no bytes move.
"""

from __future__ import annotations

import torch

FLOAT8: dict[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}

_NAMES = {dtype: name for name, dtype in FLOAT8.items()}


def is_float8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one of torch's float8 kinds."""
    return dtype in _NAMES


def as_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A ``uint8`` view of the same memory, shape and strides, and the dtype's name.

    Raises:
        ValueError: the tensor is not float8.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{tensor.dtype} is not a float8 dtype ({', '.join(FLOAT8)}); send it as it is")
    return tensor.view(torch.uint8), _NAMES[tensor.dtype]


def from_bytes(raw: torch.Tensor, name: str) -> torch.Tensor:
    """The float8 view of ``uint8`` memory; the inverse of :func:`as_bytes`.

    Raises:
        ValueError: ``raw`` is not ``uint8``, or ``name`` is not the name of a float8 dtype.
    """
    if name not in FLOAT8:
        raise ValueError(f"{name!r} is not a float8 dtype; known: {', '.join(FLOAT8)}")
    if raw.dtype != torch.uint8:
        raise ValueError(f"{name} is viewed from uint8, not from {raw.dtype}: the values would be others")
    return raw.view(FLOAT8[name])
