"""What the values of ``trainer`` must satisfy together, for each of the trainers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from ...workers.trainers.megatron.pipeline_layout import pipeline_layout_violations
from .errors import Violation
from .schema import TrainConfig

# Megatron-core 0.19's choices of recompute_modules.
RECOMPUTED_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)

# Keys that one trainer alone reads; under another one they must have their defaults.
MEGATRON_ONLY = (
    "trainer.pipeline_parallel",
    "trainer.virtual_pipeline",
    "trainer.num_layers_in_first_pipeline_stage",
    "trainer.num_layers_in_last_pipeline_stage",
    "trainer.pipeline_model_parallel_layout",
    "trainer.expert_parallel",
    "trainer.expert_tensor_parallel",
    "trainer.context_parallel",
    "trainer.distributed_optimizer",
    "trainer.recompute.method",
    "trainer.recompute.num_layers",
    "trainer.recompute.modules",
    "trainer.optimizer.cpu_offload_fraction",
)
FSDP_ONLY = ("trainer.fsdp.replicate", "trainer.fsdp.reshard_after_forward", "trainer.fsdp.cpu_offload")
# What FSDP has in the place of some.
_INSTEAD = {
    "trainer.pipeline_parallel": "FSDP shards every layer over the ranks",
    "trainer.expert_parallel": "FSDP shards the experts like all else",
    "trainer.distributed_optimizer": "FSDP always shards the optimizer's state",
    "trainer.recompute.modules": "FSDP recomputes whole layers",
    "trainer.optimizer.cpu_offload_fraction": "trainer.fsdp.cpu_offload=true offloads all",
}


def value_at(config: TrainConfig, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def data_parallel(config: TrainConfig) -> int:
    """Data-parallel ranks of the trainer; 0 where its ranks are no multiple of a copy's."""
    trainer = config.trainer
    copy = trainer.tensor_parallel
    if trainer.backend != "fsdp":
        copy *= trainer.pipeline_parallel * trainer.context_parallel
    return 0 if trainer.ranks % copy else trainer.ranks // copy


def trainer_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What is wrong with the chosen trainer's keys, and which keys are not its own.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if config.trainer.backend == "fsdp":
        yield from _foreign(config, MEGATRON_ONLY, "Megatron", "fsdp")
        yield from _ranks(
            config, bad, {"all copies with one shard each": ("fsdp.replicate", "tensor_parallel")}
        )
        yield from _fsdp_memory(config)
        return
    yield from _foreign(config, FSDP_ONLY, "FSDP", "megatron")
    dense = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    experts = ("expert_tensor_parallel", "expert_parallel", "pipeline_parallel")
    yield from _ranks(
        config, bad, {"one copy of the dense layers": dense, "one copy of the experts": experts}
    )
    yield from _stages(config)
    yield from _context(config)
    yield from _memory(config)


def _foreign(config: TrainConfig, keys: tuple[str, ...], owner: str, backend: str) -> Iterator[Violation]:
    defaults = TrainConfig()
    for key in keys:
        value, default = value_at(config, key), value_at(defaults, key)
        if value == default:
            continue
        instead = f" ({_INSTEAD[key]})" if key in _INSTEAD else ""
        yield Violation(
            (key, "trainer.backend"),
            f"{key}: {_shown(value)} is {owner}'s, and has no effect with trainer.backend={backend}{instead}; give "
            f"{_shown(default)}, or select the trainer with trainer={backend}, which drops what a recipe says for the "
            "other one",
        )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _fsdp_memory(config: TrainConfig) -> Iterator[Violation]:
    granularity = config.trainer.recompute.granularity
    if granularity not in (None, "full"):
        yield Violation(
            ("trainer.recompute.granularity", "trainer.backend"),
            f"trainer.recompute.granularity: {granularity!r}, but with trainer.backend=fsdp layers are computed again as a "
            "whole; give full, or null",
        )


def _ranks(config: TrainConfig, bad: set[str], groups: dict[str, tuple[str, ...]]) -> Iterator[Violation]:
    trainer = config.trainer
    for what, names in groups.items():
        keys = ("trainer.ranks", *(f"trainer.{name}" for name in names))
        if bad.intersection(keys):
            continue
        sizes = [value_at(config, key) for key in keys[1:]]
        world = math.prod(sizes)
        if trainer.ranks % world:
            product = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
            yield Violation(
                keys,
                f"trainer.ranks: {trainer.ranks} is no multiple of {world}, the ranks of {what} "
                f"({product}); give {-(-trainer.ranks // world) * world} ranks or smaller parallel sizes",
            )


def _stages(config: TrainConfig) -> Iterator[Violation]:
    trainer = config.trainer
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = [name for name in ends if getattr(trainer, name) is not None]
    layout = trainer.pipeline_model_parallel_layout
    if trainer.pipeline_parallel == 1:
        for name in (*given, *(("virtual_pipeline",) if trainer.virtual_pipeline is not None else ())):
            yield Violation(
                (f"trainer.{name}", "trainer.pipeline_parallel"),
                f"trainer.{name}: {getattr(trainer, name)} is of pipeline stages, and trainer.pipeline_parallel is 1; "
                "give more stages, or null",
            )
    if layout is None:
        return
    keys = ("trainer.pipeline_model_parallel_layout", *(f"trainer.{name}" for name in given))
    if given:
        yield Violation(
            keys, f"{keys[0]}: tells the layers of all stages, and so does {keys[1]}; set one to null"
        )
    stages = trainer.pipeline_parallel * (trainer.virtual_pipeline or 1)
    for problem in pipeline_layout_violations(layout, stages):
        concerned = (keys[0], "trainer.pipeline_parallel", "trainer.virtual_pipeline")
        yield Violation(concerned, f"{keys[0]}: {layout!r} can't be used: {problem}")


def _context(config: TrainConfig) -> Iterator[Violation]:
    size = config.trainer.context_parallel
    if size > 1:
        yield Violation(
            ("trainer.context_parallel",),
            f"trainer.context_parallel: {size}, but log-probabilities are computed on whole rows; give 1, and for long "
            "rows a larger trainer.tensor_parallel (sequence parallelism comes with it) or trainer.recompute",
        )


def _memory(config: TrainConfig) -> Iterator[Violation]:
    recompute, key = config.trainer.recompute, "trainer.recompute"
    granularity = recompute.granularity
    if granularity not in (None, "full", "selective"):
        text = f"{key}.granularity: {granularity!r} is neither full nor selective; give one, or null"
        yield Violation((f"{key}.granularity",), text)
        return
    if granularity == "full":
        if recompute.method not in ("uniform", "block") or recompute.num_layers is None:
            yield Violation(
                (f"{key}.granularity", f"{key}.method", f"{key}.num_layers"),
                f"{key}.method: full recomputation needs method uniform or block, and num_layers; e.g. "
                f"{key}.method=uniform {key}.num_layers=1",
            )
    else:
        for name in ("method", "num_layers"):
            if getattr(recompute, name) is not None:
                yield Violation(
                    (f"{key}.{name}", f"{key}.granularity"),
                    f"{key}.{name}: belongs to granularity full and has no effect here; set "
                    f"{key}.granularity=full, or null here",
                )
    if recompute.modules and granularity != "selective":
        yield Violation(
            (f"{key}.modules", f"{key}.granularity"),
            f"{key}.modules: belongs to granularity selective and has no effect here; set "
            f"{key}.granularity=selective, or leave it empty",
        )
    if unknown := sorted(set(recompute.modules) - set(RECOMPUTED_MODULES)):
        yield Violation(
            (f"{key}.modules",),
            f"{key}.modules: {', '.join(unknown)} is none of Megatron's {', '.join(RECOMPUTED_MODULES)}; choose some",
        )
    if config.trainer.optimizer.cpu_offload_fraction > 0 and not config.trainer.distributed_optimizer:
        yield Violation(
            ("trainer.optimizer.cpu_offload_fraction", "trainer.distributed_optimizer"),
            "trainer.optimizer.cpu_offload_fraction: Megatron's hybrid optimizer builds on the distributed one; set "
            "trainer.distributed_optimizer=true, or 0 here",
        )
