"""Which weights travel in one bucket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....integration.quantize.nvfp4_checkpoint import fused_module
from ....integration.weights.manifest import TensorSpec

_SUFFIXES = ("weight", "bias", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")


def unit_of(name: str) -> str:
    """What has to reach the loader in one call: the weights that the engine joins in one matrix, with all their scales.

    TensorRT-LLM's methods for quantized layers take part of a joined matrix only where they have learnt to: in several
    versions NVFP4 has not, whatever the model's ``allow_partial_loading`` says.
    """
    module, _, kind = name.rpartition(".")
    return fused_module(f"{module}.weight") if module and kind in _SUFFIXES else name


@dataclass(frozen=True)
class Bucket:
    """
    Attributes:
        names: of the weights that travel together.
        drawn: how many weights of the export there have to be first, from its begin.
    """

    names: tuple[str, ...]
    drawn: int


def lay_out(
    specs: Sequence[TensorSpec], bucket_bytes: int, unit_of: Callable[[str], str] = unit_of
) -> list[Bucket]:
    """Pack weights in buckets as their units are complete, in the order of the export.

    A unit larger than ``bucket_bytes`` gets a bucket of its own. What has been drawn and is not complete waits beside
    the bucket: k, say, where an export yields k, o, q and v.

    Args:
        specs: in the order of the export.
        bucket_bytes: of the weights of a bucket.
        unit_of: of a weight's name, what the weights share that have to travel together.
    """
    left = Counter(unit_of(spec.name) for spec in specs)
    waiting: dict[str, list[TensorSpec]] = defaultdict(list)
    buckets: list[Bucket] = []
    bucket: list[TensorSpec] = []
    held = drawn = 0
    for position, spec in enumerate(specs):
        unit = unit_of(spec.name)
        waiting[unit].append(spec)
        left[unit] -= 1
        if left[unit]:
            continue
        whole = waiting.pop(unit)
        nbytes = sum(found.nbytes for found in whole)
        if bucket and held + nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(found.name for found in bucket), drawn))
            bucket, held = [], 0
        bucket += whole
        held += nbytes
        drawn = position + 1
    if bucket:
        buckets.append(Bucket(tuple(found.name for found in bucket), drawn))
    return buckets
