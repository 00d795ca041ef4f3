"""Bridge as it is not in this version, but could be, or is for another model: changed while a case runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def keys_and_values_exchanged() -> Iterator[None]:
    """Bridge's QKV mapping exports keys as values: another layout under the same name."""
    from megatron.bridge.models.conversion.param_mapping import QKVMapping

    real = QKVMapping.megatron_to_hf

    @functools.wraps(real)
    def exchanged(self: QKVMapping, *args: object) -> dict[str, Tensor]:
        found = real(self, *args)
        if not found:
            return found
        keys, values = self.hf_param["k"], self.hf_param["v"]
        return {**found, keys: found[values], values: found[keys]}

    with patch.object(QKVMapping, "megatron_to_hf", exchanged):
        yield


@contextlib.contextmanager
def norms_shifted() -> Iterator[None]:
    """Bridge adds 1 to whatever is alike on all ranks, e.g. because norms became zero-centred."""
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    real = ReplicatedMapping.megatron_to_hf

    @functools.wraps(real)
    def shifted(self: ReplicatedMapping, *args: object) -> dict[str, Tensor]:
        return {name: weight + 1 for name, weight in real(self, *args).items()}

    with patch.object(ReplicatedMapping, "megatron_to_hf", shifted):
        yield


@contextlib.contextmanager
def experts_transposed() -> Iterator[None]:
    """Qwen3.5's experts as Bridge has Qwen3-VL's: transposed in the stack."""
    from megatron.bridge.models.qwen import qwen35_bridge

    mappings = functools.partial(qwen35_bridge._moe_routed_expert_mappings, transpose_on_export=True)
    with patch.object(qwen35_bridge, "_moe_routed_expert_mappings", mappings):
        yield


@contextlib.contextmanager
def a_rule_broken_on_rank_0() -> Iterator[None]:
    """The QKV rule meets something that it never thought of, on one rank of one pipeline stage."""
    from rlrefit.workers.trainers.megatron import rules

    [key] = (key for key in rules._BY_CONFIG if key[1] == "QKVMapping")
    real = rules._BY_CONFIG[key]

    def broken(task: Any) -> Any:
        if dist.get_rank() == 0:
            raise AttributeError("no such attribute")
        return real(task)

    with patch.dict(rules._BY_CONFIG, {key: broken}):
        yield


# By family.
VARIANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "qwen3-exchanged": keys_and_values_exchanged,
    "qwen3-shifted": norms_shifted,
    "qwen3-broken": a_rule_broken_on_rank_0,
    "qwen3_5_moe-transposed": experts_transposed,
}
