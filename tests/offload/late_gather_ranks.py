"""Two data-parallel Megatron ranks whose parameters are gathered late (``overlap_param_gather``)."""

from __future__ import annotations

from typing import Any

import torch

from rlrefit.integration.errors import RefitError


def run(rank: int, checkpoint: str) -> dict[str, Any]:
    """What this rank has once a refit has finished gathers, in each state that a trainer may be in."""
    return {"by_shards": _by_shards(rank, checkpoint), "by_layers": _by_layers(rank, checkpoint)}


def _by_shards(rank: int, checkpoint: str) -> dict[str, Any]:
    """The distributed optimizer: each rank updates its half of every bucket, and the gather follows in the next forward pass."""
    chunk, residence = _made(checkpoint, use_distributed_optimizer=True)
    held = [bucket.param_data.view(-1).chunk(2) for group in chunk.bucket_groups for bucket in group.buckets]

    def values() -> list[list[float]]:
        return [[half.unique().item() for half in halves] for halves in held]

    def step(value: float) -> None:
        for halves in held:
            halves[rank].fill_(value + rank)
        chunk.reset_param_sync_dispatch_state()  # as the sum of the gradients does before

    found: dict[str, Any] = {}
    step(1.0)
    residence.finish_gathers()
    found["after a step"] = values()
    step(3.0)
    chunk.start_param_sync()
    residence.finish_gathers()
    found["under way"] = values()
    for halves in held:
        halves[1 - rank].fill_(5.0 + rank)
    residence.finish_gathers()
    found["gathered before"] = values()
    step(7.0)
    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    try:
        residence.finish_gathers()
    except RefitError as error:
        found["in the gradients' memory"] = error.stage
    chunk.start_param_sync(force_sync=True)
    residence.finish_gathers()
    found["staged"] = values()
    return found


def _by_layers(rank: int, checkpoint: str) -> dict[str, Any]:
    """A layer-wise optimizer: each rank updates some parameters whole, which are gathered through the gradients' memory."""
    chunk, residence = _made(checkpoint, use_distributed_optimizer=False)
    ours = [
        parameter
        for end in ("q_layernorm.weight", "k_layernorm.weight")
        for name, parameter in chunk.named_parameters()
        if name.endswith(f"layers.0.self_attention.{end}")
    ]
    for group in chunk.bucket_groups:
        for bucket in group.buckets:
            bucket.set_layerwise_params_list([[p] if p in bucket.params else [] for p in ours])
    tokens = torch.arange(6)[None]

    def accumulate() -> None:
        with chunk.no_sync():
            chunk(tokens, tokens, None, labels=tokens).float().mean().backward()

    def gradients() -> list[torch.Tensor]:
        return [parameter.main_grad.clone() for parameter in chunk.parameters()]

    accumulate()
    before = gradients()
    residence.finish_gathers()
    kept = all(map(torch.equal, before, gradients())) and any(gradient.any() for gradient in before)
    chunk.zero_grad_buffer()
    with torch.no_grad():
        ours[rank].fill_(3.0 + rank)
    chunk.reset_param_sync_dispatch_state()
    chunk.start_param_sync()
    residence.finish_gathers()
    return {"kept gradients": kept, "under way": [parameter.unique().tolist() for parameter in ours]}


def _made(checkpoint: str, *, use_distributed_optimizer: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.offload import Residence

    made = build_megatron(checkpoint, MegatronLayout(), wrap_with_ddp=False, load_weights=False)
    late = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    chunk = DistributedDataParallel(made.model[0].config, late, made.model[0])
    return chunk, Residence([chunk], torch.device("cpu"))
