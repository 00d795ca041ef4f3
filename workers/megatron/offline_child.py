"""The process behind :mod:`.offline`: real Bridge over models on the meta device and a fake process group.

``python -m rlrefit.workers.megatron.offline_child FILE`` reads questions as JSON from standard input and writes the
answers to FILE. All that it does to Megatron and ``torch.distributed`` ends with the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ...integration.manifest import TensorSpec, dtype_name
from ..catalog import TrainLayout
from . import cpu_standins, enumeration
from . import source as source_module
from .model import MegatronLayout, _set_for_cpu, _set_layout, _set_precision
from .offline_bridge import accept_any_attention, accept_mamba, config_only_bridge
from .source import MegatronSource

# Makes the model chunks of one rank.
ModelOf = Callable[[int], AbstractContextManager[list[Any]]]


def main(path: str) -> None:
    """Answer all questions, in order."""
    # Where it is installed it would want a GPU; names and shapes are those of the stand-ins as well.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    auto_bridge = cpu_standins.ensure_megatron()
    accept_any_attention()
    answers = [_answer(auto_bridge, question) for question in json.load(sys.stdin)]
    Path(path).write_text(json.dumps(answers))


def _answer(auto_bridge: Any, question: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    layout = TrainLayout(**question["layout"])
    config, bridge = config_only_bridge(auto_bridge, question["config"])
    if config.model_type == "nemotron_h":
        accept_mamba()
    model_of = functools.partial(_model, bridge, layout, getattr(torch, question["dtype"]))
    answer: dict[str, Any] = {"ranks": []}
    for rank in question["ranks"] or [0]:
        with _source(bridge, layout, model_of, rank) as source:
            answer["specs"] = [spec.to_json() for spec in source.specs()]
            if question["ranks"]:
                answer["ranks"].append(_held(source))
    answer["seconds"] = time.monotonic() - started
    answer["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return answer


@contextlib.contextmanager
def _source(bridge: Any, layout: TrainLayout, model_of: ModelOf, rank: int) -> Iterator[MegatronSource]:
    """The rank as a source of weights, after the ranks of its pipeline have exported their stages one by one."""
    stage_size = layout.world_size // layout.pp
    names: list[list[str]] = []
    exported: dict[str, list[TensorSpec]] = {}
    for stage in range(layout.pp):
        with model_of(rank % stage_size + stage * stage_size) as model, _object_collectives(None):
            tasks = enumeration.conversion_tasks(bridge, model)
            names.append([task.global_param_name for task in tasks])
            # A parameter that two stages hold (tied embeddings) is the first one's; one that the checkpoint lacks has
            # a task without it.
            tasks = [
                task
                for task in tasks
                if task.param_weight is not None and task.global_param_name not in exported
            ]
            for task, specs in zip(tasks, enumeration.run_on_meta(bridge, model, tasks), strict=True):
                exported[task.global_param_name] = specs

    def all_stages(bridge: Any, model: list[Any], pp_group: Any) -> enumeration.Enumeration:
        tasks = enumeration.conversion_tasks(bridge, model)
        return enumeration.joined(tasks, [exported.get(task.global_param_name, []) for task in tasks])

    with (
        model_of(rank) as model,
        _object_collectives(names),
        # Probing Bridge with values needs real memory and ranks; what it would disprove here shows on the cluster.
        patch.multiple(source_module, enumerate_export=all_stages, disproved_tasks=lambda *args: {}),
    ):
        yield MegatronSource(bridge, model)


def _held(source: MegatronSource) -> dict[str, Any]:
    held, refused = source.fragments()
    return {
        "held": [
            [f.name, list(f.full_shape), list(map(list, f.box)), dtype_name(f.view.dtype)] for f in held
        ],
        "refused": refused,
    }


@contextlib.contextmanager
def _object_collectives(stages: list[list[str]] | None) -> Iterator[None]:
    """Object collectives of the fake group, which would hand out garbage.

    Args:
        stages: what the pipeline's stages answer; None if all answer as this one.
    """

    def gather(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = stages if stages is not None else [own] * len(found)

    def broadcast(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        """Everybody has them already."""

    with (
        patch.object(dist, "all_gather_object", gather),
        patch.object(dist, "broadcast_object_list", broadcast),
    ):
        yield


@contextlib.contextmanager
def _model(bridge: Any, layout: TrainLayout, dtype: torch.dtype, rank: int) -> Iterator[list[Any]]:
    """This process as one rank of the trainer, with its model on the meta device."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    meta = torch.device("meta")
    try:
        provider = _provider(bridge, layout, dtype)
        provider.initialize_model_parallel(seed=0, create_gloo_process_groups=False)
        # The stand-ins answer with their device where Megatron names CUDA.
        with meta, patch.object(cpu_standins, "_CPU", meta):
            model = provider.provide_distributed_model(
                wrap_with_ddp=False, init_model_with_meta_device=True, bf16=provider.bf16, fp16=provider.fp16
            )
        yield model
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # Each model wants its own choice of attention kernels, and none may be left from the last one.
        for key in [key for key in os.environ if key.startswith("NVTE_")]:
            del os.environ[key]


def _provider(bridge: Any, layout: TrainLayout, dtype: torch.dtype) -> Any:
    provider = bridge.to_megatron_provider(load_weights=False)
    chunks = layout.vpp if layout.vpp > 1 else None
    _set_layout(provider, MegatronLayout(layout.tp, layout.pp, chunks, layout.ep, layout.etp, layout.cp))
    provider.should_pad_vocab = True
    provider.make_vocab_size_divisible_by = layout.vocabulary_multiple
    counts = [len(stage) for stage in layout.stage_layers(provider.num_layers)]
    if len(set(counts)) > 1:
        uneven_last = counts[-1] if layout.first is None else None
        provider.num_layers_in_first_pipeline_stage = layout.first
        provider.num_layers_in_last_pipeline_stage = layout.last or uneven_last
    _set_precision(provider, dtype)
    provider.perform_initialization = False
    _set_for_cpu(provider)
    provider.moe_grouped_gemm = provider.num_moe_experts is not None
    provider.finalize()
    return provider


if __name__ == "__main__":
    main(sys.argv[1])
