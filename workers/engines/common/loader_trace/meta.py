"""Building a model without storage on which a loader still finds the values that it reads."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class IntegerTablesStayReal(TorchFunctionMode):
    """Integer factories without a device build on the CPU, under an outer ``torch.device("meta")``.

    Constructors and loaders read such tables (the expert map of an expert-parallel layer, by ``.item()``),
    so they need values. Weights are floating point and stay on meta.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if (
            func in _device_constructors()
            and kwargs.get("device") is None
            and dtype is not None
            and not dtype.is_floating_point
        ):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
