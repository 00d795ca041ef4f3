"""Tells once, as a refit is prepared, that much of an engine's weights cannot be written in place, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from math import prod

from ..common.loader_trace.trace import Manifest

logger = logging.getLogger(__name__)

# Routers, norms and biases stay below; experts, or all linear layers of a quantized engine, don't.
_LARGE_SHARE = 0.05


def warn_of_misc(manifest: Manifest, reasons: Mapping[str, str]) -> None:
    """Warn where more than a twentieth of the bytes of ``manifest`` take the misc path, with the main reason.

    Args:
        manifest: checkpoint name, full shape and dtype of every tensor.
        reasons: of the tensors that take that path.
    """
    sizes = {name: prod(shape) * dtype.itemsize for name, shape, dtype in manifest}
    total = sum(sizes.values())
    by_reason: Counter[str] = Counter()
    for name, reason in reasons.items():
        by_reason[_without_layer(reason)] += sizes[name]
    misc = by_reason.total()
    if misc <= _LARGE_SHARE * total:
        return
    [(reason, size)] = by_reason.most_common(1)
    logger.warning(
        "refit destination: %.0f%% of the weights (%.1f MB of %.1f) cannot be written in place by this engine: every "
        "refit sends them whole to each of its ranks and loads them through vLLM, which is slower. %.1f MB of them because "
        "%s",
        100 * misc / total,
        misc / 1e6,
        total / 1e6,
        size / 1e6,
        reason,
    )


def _without_layer(reason: str) -> str:
    """``layer NAME: why`` without the layer, so that equal causes count together."""
    layer, colon, why = reason.partition(": ")
    return why if colon and layer.startswith("layer ") else reason
