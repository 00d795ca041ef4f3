"""What trainer ranks under FSDP2 do in the tests; run in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_TP_PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


@dataclass(frozen=True)
class Layout:
    """How a model is sharded over the first ranks of the world."""

    shard: int
    replicate: int = 1
    tensor: int = 1  # parallelism inside
    expert: int = 1  # ranks that share the experts, inside of FSDP
    dtype: torch.dtype = torch.float32  # that the optimizer keeps
    reshard: bool = True
    offload: bool = False
    own_plan: bool = False  # transformers itself does the tensor or expert parallelism, and not DTensors
    columns: bool = False  # FSDP cuts matrices along their second dimension

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.expert


def mesh_of(layout: Layout) -> DeviceMesh:
    """The mesh of a layout; to be made by all ranks of the world, since it makes groups."""
    grid = (layout.replicate, layout.shard, layout.tensor, layout.expert)
    names = ("replicate", "shard", "tp", "expert")
    sizes = {name: n for name, n in zip(names, grid, strict=True) if n > 1 or name == "shard"}
    ranks = torch.arange(layout.ranks).view(list(sizes.values()))
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(sizes))


def build(checkpoint: str, layout: Layout, mesh: DeviceMesh) -> Any:
    """The model of a checkpoint, sharded."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    own: dict[str, Any] = {}
    if layout.own_plan and layout.tensor > 1:
        own = {"tp_plan": "auto", "device_mesh": mesh["tp"]}
    elif layout.own_plan:
        own = {
            "tp_plan": "auto",
            "device_mesh": mesh["expert"],
            "distributed_config": DistributedConfig(enable_expert_parallel=True),
        }
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=layout.dtype, **own)
    layers = model.model.layers
    if layout.tensor > 1 and not own:
        for layer in layers:
            parallelize_module(layer, mesh["tp"], _TP_PLAN)
    if layout.expert > 1 and not own:
        for layer in layers:
            experts = layer.mlp.experts
            for name, weight in list(experts.named_parameters()):
                whole = distribute_tensor(weight.detach(), mesh["expert"], [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, torch.nn.Parameter(whole))
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"],
        "reshard_after_forward": layout.reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if layout.columns:
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1) if p.dim() > 1 else None
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def adam_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained, in one call for all parameters of a mesh: DTensors one by one take many times as long."""
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    return torch.optim.AdamW([{"params": found} for found in by_mesh.values()], lr=1e-2, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, layout: Layout, mesh: DeviceMesh, seed: int) -> None:
    """A step of real training; then a forward pass, if it leaves parameters gathered."""
    tokens = torch.randint(0, 62, (2, 5), generator=torch.Generator().manual_seed(seed))
    if layout.expert == 1:
        model(input_ids=tokens, labels=tokens).loss.backward()
        if layout.tensor > 1 and not layout.own_plan:
            # Each rank has seen the heads of its own alone.
            for name, parameter in model.named_parameters():
                if "q_norm" in name or "k_norm" in name:
                    dist.all_reduce(parameter.grad.to_local(), group=mesh["tp"].get_group())
    else:  # transformers' own forward pass has no experts elsewhere
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    if layout.expert == 1 and not layout.reshard:
        with torch.no_grad():
            model(input_ids=tokens)


def gathered(model: Any, layout: Layout, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Every tensor of the model whole, by torch's and transformers' own means; a collective."""
    from transformers.integrations.tensor_parallel import gather_state_dict_for_save

    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in model.state_dict().items()
    }
    if layout.own_plan and layout.tensor > 1:
        return gather_state_dict_for_save(whole, model.tp_plan, mesh["tp"], layout.tensor)
    if layout.own_plan:  # which transformers does not gather
        for name, part in whole.items():
            if ".experts." in name:
                parts = [torch.empty_like(part) for _ in range(layout.expert)]
                dist.all_gather(parts, part.contiguous(), group=mesh["expert"].get_group())
                whole[name] = torch.cat(parts)
    return whole
