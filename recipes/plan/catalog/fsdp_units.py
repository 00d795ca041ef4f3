"""What one rank of a trainer under FSDP2 stores: chunks of a transformers 5 model's parameters.

``fully_shard`` cuts each parameter along its first dimension as ``torch.chunk`` does, whatever its units are: chunks of
equal length, the last ones shorter or empty. Parameters are those of the checkpoint but for routed experts, which
transformers packs into two parameters for each layer with the expert as their first dimension. Buffers stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....integration.layout import Box, box_of
from .expert_units import Experts
from .storage import Param, Part, Weight
from .units import Place, Shard, Unit, everything

# Families whose parameters under FSDP2 the tests hold against transformers' own.
FSDP_FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe")
_BUFFERS = ("e_score_correction_bias",)


def fsdp_params(unit: Unit, place: Place) -> Iterator[Param]:
    """The parameters of one rank, under the model's own names, without those of which it has nothing."""
    if isinstance(unit, Experts):
        yield from _packed(unit, place)
        return
    for weight in unit.weights():
        dtype = weight.dtype or place.dtype
        whole = weight.name.endswith(_BUFFERS)
        box = box_of(weight.shape) if whole else chunk(weight.shape, place.fsdp)
        shape = tuple(stop - start for start, stop in box)
        if shape[0]:
            part = Part(weight.name, weight.shape, box, everything(shape))
            yield Param(weight.name, shape, dtype, (part,))


def chunk(shape: Sequence[int], shard: Shard) -> Box:
    """A rank's box of a parameter; empty along the first dimension where there are too few rows for all ranks."""
    step = -(-shape[0] // shard.size)
    start = min(shard.rank * step, shape[0])
    return ((start, min(start + step, shape[0])), *box_of(shape[1:]))


def _packed(unit: Experts, place: Place) -> Iterator[Param]:
    weights = list(unit.weights())
    first, last = chunk((unit.count,), place.fsdp)[0]
    if first == last:
        return
    gate_up: list[Part] = []
    downs: list[Part] = []
    for local, expert in enumerate(range(first, last)):
        gate, up, down = weights[3 * expert : 3 * expert + 3]
        gate_up += [_row(gate, local, 0), _row(up, local, unit.inner)]
        downs.append(_row(down, local, 0))
    count = last - first
    yield Param(
        f"{unit.prefix}gate_up_proj", (count, 2 * unit.inner, unit.outer), place.dtype, tuple(gate_up)
    )
    yield Param(f"{unit.prefix}down_proj", (count, unit.outer, unit.inner), place.dtype, tuple(downs))


def _row(weight: Weight, local: int, row: int) -> Part:
    rows, columns = weight.shape
    return Part(
        weight.name,
        weight.shape,
        box_of(weight.shape),
        (local, slice(row, row + rows), slice(0, columns)),
    )
