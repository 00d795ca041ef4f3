"""Gated delta nets: the projections that Megatron keeps in one parameter and vLLM in two, and the rest of such a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .mamba_units import Blocks
from .sections import CatalogError, Config, norm
from .storage import Param, Part, Weight
from .units import Division, Matrix, Mesh, Place, Unit

_OWN = "linear_attn."
_MEGATRON = "self_attention."


@dataclass(frozen=True)
class Projections:
    """Queries, keys, values and z of a gated delta net, and its b and a: of each key head ``[head_dim, columns]``, of b and
    a one row for each value head.

    Megatron stores ``[queries; keys; values; z; b; a]`` of a rank's heads; vLLM the first four in one parameter, b and a
    in another.

    Attributes:
        keys: key heads, and query heads.
        values: value heads; several in turn belong to one key head.
        key_dim: of a key head.
        value_dim: of a value head.
        columns: of all.
        by_head: the checkpoint has two weights, ``in_proj_qkvz`` and ``in_proj_ba``, with all rows of one key head after
            those of another, as vLLM has them then; else ``in_proj_qkv``, ``_z``, ``_b`` and ``_a``.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    columns: int
    by_head: bool

    def weights(self) -> Iterator[Weight]:
        k, v = self.keys * self.key_dim, self.values * self.value_dim
        rows = (
            {"qkvz": 2 * k + 2 * v, "ba": 2 * self.values}
            if self.by_head
            else {"qkv": 2 * k + v, "z": v, "b": self.values, "a": self.values}
        )
        for name, count in rows.items():
            yield Weight(f"{_OWN}in_proj_{name}.weight", (count, self.columns))

    def train(self, place: Place) -> Iterator[Param]:
        found: list[tuple[Weight, int, int]] = []
        if self.by_head:
            own = range(*place.tp.cut(self.keys))
            for weight, height, offset, rows in self._of_a_head():
                found += [(weight, head * height + offset, rows) for head in own]
        else:
            for weight, first, length in self._blocks():
                start, stop = place.tp.cut(length)
                found.append((weight, first + start, stop - start))
        yield self._param(f"{_MEGATRON}in_proj.weight", found, place)

    def gen(self, place: Place) -> Iterator[Param]:
        wide, narrow = f"{_OWN}in_proj_qkvz.weight", f"{_OWN}in_proj_ba.weight"
        found: list[list[tuple[Weight, int, int]]]
        if self.by_head:
            found = [[(weight, *_run(place.tp.cut(weight.shape[0])))] for weight in self.weights()]
        else:
            cut = [
                (weight, first + start, rows)
                for weight, first, length in self._blocks()
                for start, rows in (_run(place.tp.cut(length)),)
            ]
            found = [cut[:4], cut[4:]]
        for name, runs in zip((wide, narrow), found, strict=True):
            yield self._param(name, runs, place)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the key heads of {_OWN}in_proj", self.keys, "tp")

    gen_divisions = train_divisions

    def _blocks(self) -> list[tuple[Weight, int, int]]:
        """Queries, keys, values, z, b, a of the checkpoint's four weights: the weight, the first row there, all rows."""
        qkv, z, b, a = self.weights()
        k, v = self.keys * self.key_dim, self.values * self.value_dim
        return [
            (qkv, 0, k),
            (qkv, k, k),
            (qkv, 2 * k, v),
            (z, 0, v),
            (b, 0, self.values),
            (a, 0, self.values),
        ]

    def _of_a_head(self) -> list[tuple[Weight, int, int, int]]:
        """The same of one key head in the checkpoint's two weights: the weight, its rows of a head, the first, how many."""
        qkvz, ba = self.weights()
        per_key = self.values // self.keys
        k, v = self.key_dim, per_key * self.value_dim
        wide, narrow = 2 * k + 2 * v, 2 * per_key
        return [
            (qkvz, wide, 0, k),
            (qkvz, wide, k, k),
            (qkvz, wide, 2 * k, v),
            (qkvz, wide, 2 * k + v, v),
            (ba, narrow, 0, per_key),
            (ba, narrow, per_key, per_key),
        ]

    def _param(self, name: str, runs: list[tuple[Weight, int, int]], place: Place) -> Param:
        parts: list[Part] = []
        row = 0
        for weight, start, rows in runs:
            box = ((start, start + rows), (0, self.columns))
            parts.append(
                Part(weight.name, weight.shape, box, (slice(row, row + rows), slice(0, self.columns)))
            )
            row += rows
        return Param(name, (row, self.columns), place.dtype, tuple(parts))


def gated_delta_net(config: Config, *, by_head: bool) -> tuple[Unit, ...]:
    """A layer's gated delta net, with the layer's first norm fused into Megatron's projection.

    Raises:
        CatalogError: value heads that key heads can't share evenly.
    """
    hidden = config["hidden_size"]
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if values % keys:
        raise CatalogError(
            f"linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}, as each key head of a gated "
            "delta net needs equally many"
        )
    output = f"{_OWN}out_proj.weight"
    return (
        norm("input_layernorm", f"{_MEGATRON}in_proj.layer_norm_weight", hidden),
        Projections(keys, values, key_dim, value_dim, hidden, by_head),
        Blocks(
            f"{_OWN}conv1d.weight",
            f"{_MEGATRON}conv1d.weight",
            f"{_OWN}conv1d.weight",
            (keys * key_dim, keys * key_dim, values * value_dim),
            (1, config["linear_conv_kernel_dim"]),
            keys,
        ),
        Matrix(
            f"{_OWN}A_log",
            f"{_MEGATRON}A_log",
            f"{_OWN}A_log",
            (values,),
            0,
            gen_dtype=torch.float32,
            gen_refused="vLLM keeps it in FP32",
        ),
        Matrix(f"{_OWN}dt_bias", f"{_MEGATRON}dt_bias", f"{_OWN}dt_bias", (values,), 0),
        Matrix(
            f"{_OWN}norm.weight",
            f"{_MEGATRON}out_norm.weight",
            f"{_OWN}norm.weight",
            (value_dim,),
            train_refused="zero-centred norm: Bridge adds 1 to it on export",
        ),
        Matrix(output, f"{_MEGATRON}out_proj.weight", output, (hidden, values * value_dim), 1),
    )


def _run(cut: tuple[int, int]) -> tuple[int, int]:
    start, stop = cut
    return start, stop - start
