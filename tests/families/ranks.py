"""One rank of four: builds families in layouts through the real Bridge, and holds its fragments against the export."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.as_sent import as_sent, encoded

from . import mappings
from .cases import INT4, Case, Layout
from .checkpoints import know_configuration
from .variants import VARIANTS

# Stands in a case where a family's name does, for :mod:`.mappings`.
MAPPINGS = "mappings"


def walk(rank: int, cases: Sequence[Case], checkpoints: dict[tuple[str, bool], str], folder: str) -> None:
    """Write ``FOLDER/CASE.json`` for one case after another; ends at the first one that raises.

    Cases of the same groups that follow one another share them: making them takes as long as a case itself.
    A rank that raised leaves its peers in a collective, so the caller has to start again with the cases that are left.
    """
    accept_families()
    for case, following in zip(cases, (*cases[1:], None), strict=True):
        is_mappings = case.family == MAPPINGS
        found = (
            _examine_mappings(case.layout) if is_mappings else _examine(case, checkpoints[case.checkpoint])
        )
        forget(following is not None and following.layout.groups == case.layout.groups)
        if rank == 0:
            (Path(folder) / f"{case}.json").write_text(json.dumps(found))


def accept_families() -> None:
    """Megatron builds every family here."""
    from rlrefit.recipes.plan.offline_bridge import accept_any_attention, accept_delta_nets, accept_mamba
    from rlrefit.workers.trainers.megatron.cpu_standins import ensure_megatron

    ensure_megatron()
    accept_any_attention()
    accept_mamba()
    accept_delta_nets()


def _examine(case: Case, checkpoint: str) -> dict[str, Any]:
    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    with VARIANTS.get(case.family, contextlib.nullcontext)():
        bridge, model = build(case.layout, checkpoint)
        try:
            source = MegatronSource(bridge, model)
        except RefitError as error:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, [str(error), type(error.__cause__).__name__])
            return {"errors": told}
        for task in source._tasks:
            randomize(task)
        wanted = exported(bridge, model)
        return compare(*_as_int4(source, wanted)) if case in INT4 else compare(source, wanted)


def forget(but_for_groups: bool) -> None:
    """Leave nothing of a case to the next one: Megatron's state, its groups and their threads, its environment."""
    from megatron.core import parallel_state

    dist.barrier()
    if not but_for_groups:
        parallel_state.destroy_model_parallel()
        for group in [group for group in _world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
    # Each model wants its own choice of attention kernels.
    for key in [key for key in os.environ if key.startswith("NVTE_")]:
        del os.environ[key]


def _examine_mappings(layout: Layout) -> dict[str, Any]:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mappings.examine(layout.tp))
    return {
        **{name: [line for part in found for line in part[name]] for name in mappings.CONVERSIONS},
        "unclassified": mappings.unclassified(),
    }


def build(layout: Layout, checkpoint: str) -> tuple[Any, list[Any]]:
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, set_for_cpu, set_layout, set_precision

    know_configuration(Path(checkpoint))
    bridge = AutoBridge.from_hf_pretrained(checkpoint, trust_remote_code=_take_modules(Path(checkpoint)))
    provider = bridge.to_megatron_provider(load_weights=False)
    vpp = layout.vpp if layout.vpp > 1 else None
    set_layout(provider, MegatronLayout(layout.tp, layout.pp, vpp, layout.ep, layout.etp, layout.cp))
    provider.num_layers_in_first_pipeline_stage = layout.first
    provider.pipeline_model_parallel_layout = layout.stages
    set_precision(provider, torch.bfloat16)
    set_for_cpu(provider)
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = provider.provide_distributed_model(
        ddp_config=ddp if layout.ddp else None,
        wrap_with_ddp=layout.ddp,
        use_cpu_initialization=True,
    )
    return bridge, model


def _take_modules(checkpoint: Path) -> bool:
    """Whether a checkpoint brings modules of the model; transformers copies them to a folder of this rank's then."""
    brings = any(checkpoint.glob("modeling_*.py"))
    if brings:
        from transformers import dynamic_module_utils

        dynamic_module_utils.HF_MODULES_CACHE = str(checkpoint.parent / f"modules-{dist.get_rank()}")
    return brings


def randomize(task: Any, seed: int = 0) -> None:
    """Values that no other parameter, no other shard and no other seed has, padding of the vocabulary included."""
    if task.param_weight is None:
        return
    weight = task.param_weight.data
    # Megatron marks what it cuts; the rest has to be alike on the ranks that hold it.
    is_cut = getattr(task.param_weight, "tensor_model_parallel", False)
    place = f"{task.global_param_name} {task.mapping.tp_rank if is_cut else 0} {seed}"
    generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
    weight.copy_(torch.randn(weight.shape, generator=generator))


def exported(bridge: Any, model: list[Any], unquantized: bool = True) -> dict[str, torch.Tensor]:
    """The oracle: Bridge's own export, without the padding of the vocabulary.

    Where Bridge makes INT4 of weights by itself (Kimi-K2.5's experts), ``unquantized`` ones are what it exports if it is asked for a
    dtype. That would cast all others too.
    """
    vocabulary = bridge.hf_pretrained.config.get_text_config().vocab_size
    padded = (
        "embed_tokens.weight",
        "lm_head.weight",
        "backbone.embeddings.weight",
        "shared_head.head.weight",
        "word_embeddings.weight",
    )
    found = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    if unquantized and any(name.endswith("_packed") for name in found):
        plain = bridge.export_hf_weights(model, cpu=True, show_progress=False, weight_dtype=torch.bfloat16)
        found = {name: found.get(name, weight) for name, weight in plain}
    return {name: weight[:vocabulary] if name.endswith(padded) else weight for name, weight in found.items()}


def _as_int4(source: Any, wanted: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A source that makes INT4 of experts, and what is to come of the full weights."""
    from rlrefit.integration.quantize.formats import Int4
    from rlrefit.integration.weights.quantizing import QuantizingSource

    formats = {name: Int4(32) for name in wanted if ".mlp.experts." in name}
    return QuantizingSource(source, formats), encoded(wanted, formats)


def compare(source: Any, wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What is wrong on any rank, and how the weights travel."""
    fragments, refused = source.fragments()
    wrong = [
        f"rank {dist.get_rank()}: {f.name} {f.box} is not what Bridge exports"
        for f in fragments
        if not _same(f.part_of(wanted[f.name]), as_sent(f) if f.encoding else f.view)
    ]
    specs = {spec.name: spec for spec in source.specs()}
    wrong += [f"{name}: in one of specs and export" for name in specs.keys() ^ wanted.keys()]
    wrong += [
        f"{name}: {tuple(weight.shape)}, specs say {specs[name].shape}"
        for name, weight in wanted.items()
        if tuple(weight.shape) != specs[name].shape or weight.dtype != specs[name].dtype
    ]
    digest = zlib.crc32(b"".join(_bytes(weight).numpy().tobytes() for weight in wanted.values()))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (wrong, refused, [(f.name, f.box, f.axes) for f in fragments], digest))
    reasons = {name: reason for _, part, _, _ in ranks for name, reason in part.items()}
    wrong = [line for part, _, _, _ in ranks for line in part]
    if len({digest for _, _, _, digest in ranks}) > 1:
        wrong.append(
            "ranks export different weights, so replicas are no replicas and the comparison proves nothing"
        )
    covered = {name: torch.zeros(spec.shape, dtype=torch.bool) for name, spec in specs.items()}
    for _, _, boxes, _ in ranks:
        for name, box, axes in boxes:
            seen = covered[name] if axes is None else axes.see(covered[name])
            seen[tuple(slice(*side) for side in box)] = True
    wrong += [
        f"{name}: no rank holds all"
        for name, mask in covered.items()
        if name not in reasons and not mask.all()
    ]
    misc = dict(source.export(list(reasons)))
    wrong += [f"{name}: misc" for name in reasons if not _same(misc.get(name), wanted[name])]
    return {
        "wrong": wrong,
        "reasons": reasons,
        "sizes": {name: spec.nbytes for name, spec in specs.items()},
        "weights": len(specs),
        "fragments": sum(len(boxes) for _, _, boxes, _ in ranks),
    }


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
