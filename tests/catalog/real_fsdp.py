"""What transformers' models under ``fully_shard`` hold on one rank of any layout, in one process without the others.

:func:`answers` runs in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlrefit.integration.weights.manifest import dtype_name


def answers(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_one(**case) for case in cases]


def _one(config: dict[str, Any], replicate: int, fsdp: int, rank: int) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlrefit.workers.trainers.fsdp.source import FSDPSource

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=replicate * fsdp)
    mesh = init_device_mesh("cpu", (replicate, fsdp), mesh_dim_names=("replicate", "shard"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    source = FSDPSource(model, torch.bfloat16)
    fragments, refused = source.fragments()
    held: dict[str, list[Any]] = {}
    for fragment in fragments:
        if fragment.nbytes:
            held.setdefault(fragment.name, []).append(
                [[list(side) for side in fragment.box], dtype_name(fragment.dtype)]
            )
    locals_ = {
        name: list((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in model.named_parameters()
    }
    dist.destroy_process_group()
    return {
        "specs": [spec.to_json() for spec in source.specs()],
        "held": held,
        "refused": refused,
        "parameters": {name: shape for name, shape in locals_.items() if shape[0]},
    }
