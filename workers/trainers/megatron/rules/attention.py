"""Rules of fused attention projections: rows come in query groups, each with its queries, one key, one value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .....integration.layout import Fragment
from .pieces import Refused, Run, lay, one_name, require_rows_split, shard


class _Heads(NamedTuple):
    """Sizes of an attention layer.

    Attributes:
        queries: query heads.
        groups: query groups, each with one key head and one value head.
        size: rows of a head.
        gated: each query head has an output gate of as many rows.
    """

    queries: int
    groups: int
    size: int
    gated: bool

    @property
    def per_group(self) -> int:
        return self.queries // self.groups


class _Place(NamedTuple):
    """Where queries, keys and values stand: name, or None if Bridge leaves them out, rows of the whole tensor, first of theirs in it."""

    name: str | None
    total: int
    first: int = 0

    def run(self, start: int, count: int) -> Run:
        return Run(self.name, self.total, self.first + start, count)


def qkv(task: Any) -> list[Fragment]:
    """Queries, keys and values in tensors of their own; an output gate's rows follow those of its query head."""
    heads, names = _heads(task), task.mapping.hf_param
    keys = heads.groups * heads.size
    places = (
        _Place(names["q"], _query_rows(heads)),
        _Place(names["k"], keys),
        _Place(names["v"], keys),
    )
    return _own_groups(task, heads, places)


def qkv_without_copies(task: Any, exported: Mapping[str, tuple[int, ...]]) -> list[Fragment]:
    """As :func:`qkv`, of layers that take keys as values, or keys and values of a layer before.

    Bridge fills the rows that such a layer has no weights for, and leaves them out of its export.
    """
    heads, names = _heads(task), task.mapping.hf_param
    if names["q"] not in exported:
        raise Refused("QKV: which of its weights Bridge exports is not known here")
    keys = heads.groups * heads.size
    key, value = (names[part] if names[part] in exported else None for part in ("k", "v"))
    return _own_groups(
        task, heads, (_Place(names["q"], _query_rows(heads)), _Place(key, keys), _Place(value, keys))
    )


def concatenated_qkv(task: Any) -> list[Fragment]:
    """``[queries; keys; values]`` in one tensor."""
    heads, name = _heads(task), one_name(task)
    queries, keys = _query_rows(heads), heads.groups * heads.size
    total = queries + 2 * keys
    places = (
        _Place(name, total),
        _Place(name, total, queries),
        _Place(name, total, queries + keys),
    )
    return _own_groups(task, heads, places)


def kv(task: Any) -> list[Fragment]:
    """Keys and values alone, in turn."""
    heads, names = _heads(task), task.mapping.hf_param
    require_rows_split(task)
    size, total = heads.size, heads.groups * heads.size
    runs = (
        Run(names[key], total, group * size, size)
        for group in _local_groups(task, heads)
        for key in ("k", "v")
    )
    return lay(task.param_weight.data, runs)


def qkvg(task: Any) -> list[Fragment]:
    """Queries, keys, values and one gate row per query head.

    With Megatron's own output gate each gate row is repeated over its head's rows, of which Bridge exports the first;
    without, all gate rows follow the groups, and TP cuts the whole wherever it falls.
    """
    heads, mapping = _heads(task), task.mapping
    if task.param_weight.ndim != 2:
        raise Refused("QKV with gates: Bridge converts no biases of it")
    require_rows_split(task)
    names, keys = mapping.hf_param, heads.groups * heads.size
    places = (
        _Place(names["q"], heads.queries * heads.size),
        _Place(names["k"], keys),
        _Place(names["v"], keys),
    )
    gate = _Place(names["g"], heads.queries)
    plain = heads._replace(gated=False)
    if heads.gated:
        groups = _local_groups(task, heads)
        runs = [run for group in groups for run in _group(plain, places, group, gate)]
        return lay(task.param_weight.data, runs)
    runs = [run for group in range(heads.groups) for run in _group(plain, places, group)]
    runs.append(gate.run(0, heads.queries))
    return lay(task.param_weight.data, runs, mapping.tp_rank, mapping.tp_size)


def norm_over_heads(task: Any) -> list[Fragment]:
    """A norm over all query heads or all key heads, cut as these are; where ranks outnumber heads, several hold the same."""
    view = task.param_weight.data
    size, rank = task.mapping._get_shard_spec(
        shard_size=view.shape[0], megatron_module=task.megatron_module, global_size_attr="global_dim"
    )
    return [shard(one_name(task), view, 0, rank, size)]


def _heads(task: Any) -> _Heads:
    config = task.mapping._get_config(task.megatron_module)
    heads, groups = config.num_attention_heads, config.num_query_groups
    weight = task.param_weight
    if weight.ndim == 2 and weight.shape[1] != config.hidden_size:
        # Bridge would take it for scales of blocks of a weight.
        raise Refused(f"QKV: {weight.shape[1]} columns are not the hidden size {config.hidden_size}")
    if heads % groups:
        raise Refused(f"QKV: {heads} query heads in {groups} groups")
    size = config.kv_channels or config.hidden_size // heads
    return _Heads(heads, groups, size, bool(getattr(config, "attention_output_gate", False)))


def _query_rows(heads: _Heads) -> int:
    return heads.queries * heads.size * (2 if heads.gated else 1)


def _local_groups(task: Any, heads: _Heads) -> range:
    rank, size = task.mapping.tp_rank, task.mapping.tp_size
    if heads.groups % size:
        raise Refused(f"QKV: {heads.groups} query groups can't be split over TP {size}")
    count = heads.groups // size
    return range(rank * count, (rank + 1) * count)


def _own_groups(task: Any, heads: _Heads, places: tuple[_Place, _Place, _Place]) -> list[Fragment]:
    require_rows_split(task)
    groups = _local_groups(task, heads)
    return lay(task.param_weight.data, [run for group in groups for run in _group(heads, places, group)])


def _group(
    heads: _Heads, places: tuple[_Place, _Place, _Place], group: int, gate_rows: _Place | None = None
) -> Iterator[Run]:
    query, key, value = places
    size, first = heads.size, group * heads.per_group
    if heads.gated:
        # In Megatron a group's queries and then its gates; in the checkpoint each query head with its gate.
        for offset in (0, size):
            for head in range(first, first + heads.per_group):
                yield query.run(2 * head * size + offset, size)
    else:
        yield query.run(first * size, heads.per_group * size)
    if gate_rows is not None:
        for head in range(first, first + heads.per_group):
            yield gate_rows.run(head, 1)
            yield Run(None, 0, 0, size - 1)
    yield key.run(group * size, size)
    yield value.run(group * size, size)
