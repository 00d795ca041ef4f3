"""Rules of Mamba mixers and gated delta nets: several blocks of rows in one weight, each cut by TP on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .....integration.layout import Fragment
from .pieces import Refused, Run, evenly, lay, one_name, require_rows_split


def mamba_projection(task: Any) -> list[Fragment]:
    """``[z; x; B; C; dt]``."""
    config = task.mapping._get_config(task.megatron_module)
    inner, state = _mamba_sizes(config)
    return _blocks(task, one_name(task), (inner, inner, state, state, config.mamba_num_heads))


def mamba_convolution(task: Any) -> list[Fragment]:
    """``[x; B; C]``."""
    inner, state = _mamba_sizes(task.mapping._get_config(task.megatron_module))
    return _blocks(task, one_name(task), (inner, state, state))


def gdn_convolution(task: Any) -> list[Fragment]:
    """``[queries; keys; values]``."""
    heads = _delta_heads(task)
    return _blocks(task, one_name(task), (heads.key_rows, heads.key_rows, heads.value_rows))


def gdn_projections(task: Any) -> list[Fragment]:
    """One tensor of ``[queries; keys; values]``, one of z, one of b, one of a."""
    heads, names, mapping = _delta_heads(task), task.mapping.hf_param, task.mapping
    require_rows_split(task)
    keys, values = heads.key_rows, heads.value_rows
    qkv = 2 * keys + values
    blocks = (
        (names["qkv"], qkv, 0, keys),
        (names["qkv"], qkv, keys, keys),
        (names["qkv"], qkv, 2 * keys, values),
        (names["z"], values, 0, values),
        (names["b"], heads.values, 0, heads.values),
        (names["a"], heads.values, 0, heads.values),
    )
    runs = []
    for name, total, first, length in blocks:
        part = evenly(length, mapping.tp_size, "rows of a gated delta net's block")
        runs.append(Run(name, total, first + mapping.tp_rank * part, part))
    return lay(task.param_weight.data, runs)


def gdn_projection(task: Any) -> list[Fragment]:
    """One tensor of each key head's query, key, values and z; one of each key head's b and a."""
    require_rows_split(task)
    return lay(task.param_weight.data, _by_key_heads(task))


def _by_key_heads(task: Any) -> Iterator[Run]:
    heads, names, mapping = _delta_heads(task), task.mapping.hf_param, task.mapping
    local = evenly(heads.keys, mapping.tp_size, "key heads of a gated delta net")
    values = heads.values // heads.keys
    rows, value_rows = heads.key_size, values * heads.value_size
    wide, narrow = 2 * rows + 2 * value_rows, 2 * values
    # Place in a key head's rows, and how many: query, key, values, z of the one tensor, b, a of the other.
    parts = (
        (names["qkvz"], wide, 0, rows),
        (names["qkvz"], wide, rows, rows),
        (names["qkvz"], wide, 2 * rows, value_rows),
        (names["qkvz"], wide, 2 * rows + value_rows, value_rows),
        (names["ba"], narrow, 0, values),
        (names["ba"], narrow, values, values),
    )
    for name, height, offset, count in parts:
        for head in range(mapping.tp_rank * local, (mapping.tp_rank + 1) * local):
            yield Run(name, heads.keys * height, head * height + offset, count)


class _DeltaHeads(NamedTuple):
    """Sizes of a gated delta net: key heads and value heads, and the rows of each."""

    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def key_rows(self) -> int:
        return self.keys * self.key_size

    @property
    def value_rows(self) -> int:
        return self.values * self.value_size


def _delta_heads(task: Any) -> _DeltaHeads:
    config = task.mapping._get_config(task.megatron_module)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise Refused(f"gated delta net: {values} value heads over {keys} key heads")
    return _DeltaHeads(keys, values, config.linear_key_head_dim, config.linear_value_head_dim)


def _mamba_sizes(config: Any) -> tuple[int, int]:
    return config.mamba_num_heads * config.mamba_head_dim, config.mamba_state_dim * config.mamba_num_groups


def _blocks(task: Any, name: str, lengths: Sequence[int]) -> list[Fragment]:
    """Blocks one after another on both sides; a TP rank holds its part of each."""
    mapping = task.mapping
    require_rows_split(task)
    runs, first = [], 0
    for length in lengths:
        part = evenly(length, mapping.tp_size, f"rows of a block of {name}")
        runs.append(Run(name, sum(lengths), first + mapping.tp_rank * part, part))
        first += length
    return lay(task.param_weight.data, runs)
