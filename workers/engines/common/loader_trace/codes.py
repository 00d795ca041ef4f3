"""Which tensors of a manifest a loader would cast to codes that need scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .trace import LoaderTrace, Manifest

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2})


def unscaled_casts(
    trace: LoaderTrace, manifest: Manifest, parameters: Mapping[str, torch.Tensor]
) -> list[tuple[str, str, torch.dtype]]:
    """Checkpoint name, parameter and dtype of numbers that are cast to FP8 or integers, in manifest order.

    Args:
        trace: of ``manifest``.
        manifest: checkpoint name, full shape and dtype of every tensor.
        parameters: of the engine, by name.
    """
    return [
        (name, parameter, dtype)
        for name, _, dtype in manifest
        if dtype.is_floating_point and dtype.itemsize > 1
        for parameter in sorted(trace.touched[name] & parameters.keys())
        if parameters[parameter].dtype in FLOAT8 or not parameters[parameter].dtype.is_floating_point
    ]
