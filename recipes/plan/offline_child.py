"""The process behind :mod:`.offline`: real Bridge over models on the meta device and a fake process group.

``python -m rlrefit.recipes.plan.offline_child FILE`` reads questions as JSON from standard input and writes the
answers to FILE. All that it does to Megatron and ``torch.distributed`` ends with the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...integration.weights.manifest import TensorSpec, dtype_name
from ...workers.trainers.megatron import cpu_standins, enumeration
from ...workers.trainers.megatron.model import MegatronLayout, set_for_cpu, set_layout, set_precision
from ...workers.trainers.megatron.source import MegatronSource, Survey
from .catalog import TrainLayout
from .offline_bridge import (
    accept_any_attention,
    accept_delta_nets,
    accept_mamba,
    config_only_bridge,
    replaced,
)

# Makes the model chunks of one rank.
ModelOf = Callable[[int], AbstractContextManager[list[Any]]]


def main(path: str) -> None:
    """Answer all questions, in order."""
    # Where it is installed it would want a GPU; names and shapes are those of the stand-ins as well.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    auto_bridge = cpu_standins.ensure_megatron()
    accept_any_attention()
    accept_delta_nets()
    answers = [_answer(auto_bridge, question) for question in json.load(sys.stdin)]
    Path(path).write_text(json.dumps(answers))


def _answer(auto_bridge: Any, question: dict[str, Any]) -> dict[str, Any]:
    started = time.process_time()
    layout = TrainLayout(**question["layout"])
    config, bridge = config_only_bridge(auto_bridge, question["config"])
    if config.model_type == "nemotron_h":
        accept_mamba()
    model_of = functools.partial(_model, bridge, layout, getattr(torch, question["dtype"]))
    ranks = question["ranks"] or [0]
    stage_size = layout.world_size // layout.pp
    exports = {
        column: _export_of(bridge, layout, model_of, column) for column in {r % stage_size for r in ranks}
    }
    answer: dict[str, Any] = {"ranks": []}
    for rank in ranks:
        with _source(bridge, model_of, rank, exports[rank % stage_size]) as source:
            answer["specs"] = [spec.to_json() for spec in source.specs()]
            if question["ranks"]:
                answer["ranks"].append(_held(source))
    answer["cpu_seconds"] = time.process_time() - started
    answer["peak_rss_bytes"] = _peak_rss_bytes()
    return answer


def _peak_rss_bytes() -> int:
    # Not getrusage's: that has the peak of the process that started this one, too.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@dataclass(frozen=True)
class _PipelineExport:
    """What the ranks of one pipeline export.

    Attributes:
        names: of the parameters of each stage's tasks.
        specs: what is exported of a parameter.
    """

    names: list[list[str]]
    specs: dict[str, list[TensorSpec]]


def _export_of(bridge: Any, layout: TrainLayout, model_of: ModelOf, column: int) -> _PipelineExport:
    """The stages of one pipeline, which has ``column`` in the first stage, export one by one."""
    stage_size = layout.world_size // layout.pp
    found = _PipelineExport([], {})
    for stage in range(layout.pp):
        with model_of(column + stage * stage_size) as model, _object_collectives(None):
            tasks = enumeration.conversion_tasks(bridge, model)
            found.names.append([task.global_param_name for task in tasks])
            # A parameter that two stages hold (tied embeddings) is the first one's; one that the checkpoint lacks has
            # a task without it.
            tasks = [
                task
                for task in tasks
                if task.param_weight is not None and task.global_param_name not in found.specs
            ]
            for task, specs in zip(tasks, enumeration.run_on_meta(bridge, model, tasks), strict=True):
                found.specs[task.global_param_name] = specs
    return found


@contextlib.contextmanager
def _source(bridge: Any, model_of: ModelOf, rank: int, export: _PipelineExport) -> Iterator[MegatronSource]:
    """The rank as a source of weights."""
    with model_of(rank) as model, _object_collectives(export.names):
        tasks = enumeration.conversion_tasks(bridge, model)
        joined = enumeration.joined(tasks, [export.specs.get(task.global_param_name, []) for task in tasks])
        # Probing Bridge with values needs real memory and ranks; what it would disprove here shows on the cluster.
        yield MegatronSource(bridge, model, Survey(joined, disproved={}))


def _held(source: MegatronSource) -> dict[str, Any]:
    held, refused = source.fragments()
    return {
        "held": [
            [
                f.name,
                list(f.full_shape),
                list(map(list, f.box)),
                dtype_name(f.view.dtype),
                f.axes and [f.axes.splits, f.axes.order],
            ]
            for f in held
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

    with replaced(dist, all_gather_object=gather, broadcast_object_list=broadcast):
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
        with meta, replaced(cpu_standins, DEVICE=meta):
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
    set_layout(provider, MegatronLayout(layout.tp, layout.pp, chunks, layout.ep, layout.etp, layout.cp))
    provider.should_pad_vocab = True
    provider.make_vocab_size_divisible_by = layout.vocabulary_multiple
    counts = [len(stage) for stage in layout.stage_layers(provider.num_layers)]
    if len(set(counts)) > 1:
        uneven_last = counts[-1] if layout.first is None else None
        provider.num_layers_in_first_pipeline_stage = layout.first
        provider.num_layers_in_last_pipeline_stage = layout.last or uneven_last
    set_precision(provider, dtype)
    provider.perform_initialization = False
    set_for_cpu(provider)
    provider.moe_grouped_gemm = provider.num_moe_experts is not None
    provider.finalize()
    return provider


if __name__ == "__main__":
    main(sys.argv[1])
