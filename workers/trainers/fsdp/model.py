"""Build a transformers model of a Hugging Face checkpoint under FSDP2, in a given layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ....integration.weights.endpoints import rank_device
from ..checkpoint_ranks import check_on_all_ranks
from .casting import kept_in_float32


@dataclass(frozen=True)
class FSDPLayout:
    """How a model is spread over the ranks; what is left over shards the parameters.

    Attributes:
        replicate: copies of the sharded model (HSDP); 1 shards over all ranks.
        tensor_parallel: TP size, inside of each shard group, by transformers' own plan (``tp_plan="auto"``).
    """

    replicate: int = 1
    tensor_parallel: int = 1

    def violations(self, world_size: int) -> list[str]:
        """Why ``world_size`` ranks can't have this layout, one sentence each; empty if they can."""
        found = [f"{name} is {size}; give at least 1" for name, size in vars(self).items() if size < 1]
        if found:
            return found
        copies = self.replicate * self.tensor_parallel
        if world_size % copies:
            found.append(f"{world_size} ranks are no multiple of replicate x tensor_parallel = {copies}")
        return found


@dataclass(frozen=True)
class FSDPModel:
    """A built model.

    Attributes:
        model: the root that ``fully_shard`` was applied to.
        mesh: with the dimensions ``replicate``, ``shard`` and ``tp``, those of size 1 as well.
        cut_by_tensor_parallel: names of the parameters of which each TP rank has a part; it has the others whole.
    """

    model: Any
    mesh: DeviceMesh
    cut_by_tensor_parallel: frozenset[str]


def build_fsdp(
    model_path: str | Path,
    layout: FSDPLayout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    keep_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    recompute: bool = False,
    lora: Any = None,
    trust_remote_code: bool = False,
) -> FSDPModel:
    """Build this rank's part of the model and load its weights; every rank calls it.

    ``torch.distributed`` must be initialised (NCCL on GPUs, gloo on CPUs). Each decoder layer is a unit of FSDP, and the
    rest is the root's. Without TP the checkpoint is read by rank 0 alone, which hands every rank its shards tensor by
    tensor; under TP each rank reads its own part.

    Modules that transformers keeps in FP32 beside layers in ``dtype`` (routers of some) are units of their own, in FP32.

    Args:
        model_path: a Hugging Face checkpoint of safetensors: a folder, or a hub name, which is fetched to this
            host's cache.
        layout: of the ranks.
        dtype: that layers compute in and that parameters are gathered in. Gradients are reduced in float32.
        keep_dtype: of the shards, which the optimizer writes.
        reshard_after_forward: free gathered parameters after the forward pass, and gather them again for the
            backward pass.
        cpu_offload: keep shards, gradients and the optimizer's state in host memory.
        recompute: compute every layer's activations again in the backward pass.
        lora: peft's ``LoraConfig``: its factors alone are trained, and their shards are float32, whatever ``keep_dtype`` is. Rank 0
            draws them from torch's generator.
        trust_remote_code: run the code that the checkpoint brings.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: the layout does not fit the ranks, transformers has no TP plan for the model, or keeps a parameter in
            FP32 that FSDP can't gather apart.
        CheckpointMismatch: the checkpoint is incomplete, damaged, or of another shape; the same on all ranks.
    """
    if lora is not None and layout.tensor_parallel > 1:
        raise ValueError(
            "transformers has no tensor-parallel plan for LoRA's factors; give tensor_parallel 1"
        )
    folder, config = check_on_all_ranks(
        model_path, layout, trust_remote_code=trust_remote_code, needs_model=True
    )
    _set_for_reinforcement_learning(config)
    device = rank_device()
    shards = dist.get_world_size() // (layout.replicate * layout.tensor_parallel)
    mesh = init_device_mesh(
        device.type,
        (layout.replicate, shards, layout.tensor_parallel),
        mesh_dim_names=("replicate", "shard", "tp"),
    )
    model, cut, loaded = _unsharded(folder, config, keep_dtype, mesh, trust_remote_code)
    if lora is not None:
        for each in (model, loaded) if loaded is not None else (model,):
            _add_factors(each, lora)
    layers, precise = _layers(model), _precise_modules(model, dtype)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"],
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == keep_dtype and lora is None else dtype, reduce_dtype=torch.float32
        ),
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in precise:
        # As transformers computes with them: neither gathered in another dtype nor given inputs in one.
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        _materialize(module, device)
        fully_shard(module, **{**options, "mp_policy": exact})
    for layer in layers:
        _materialize(layer, device)
        fully_shard(layer, **options)
    _materialize(model, device)
    fully_shard(model, **options)
    if layout.tensor_parallel == 1:
        _fill(model, loaded, device)
    return FSDPModel(model, mesh, cut)


def _unsharded(
    folder: Path, config: Any, dtype: torch.dtype, mesh: DeviceMesh, trust_remote_code: bool
) -> tuple[Any, frozenset[str], Any]:
    """The model before FSDP, the names of what TP has cut, and on rank 0 without TP the weights' model.

    Without TP the first has shapes and no memory.
    """
    from transformers import AutoModelForCausalLM

    # Said, and not left out: transformers would ask at the terminal.
    common: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, **common)
    if mesh["tp"].size() == 1:
        loaded = None
        if dist.get_rank() == 0:
            loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, **common)
        return whole, frozenset(), loaded
    if not whole.tp_plan:
        raise ValueError(
            f"transformers has no plan for tensor parallelism of {type(whole).__name__}; give tensor_parallel 1, "
            "FSDP shards it over all ranks"
        )
    part = AutoModelForCausalLM.from_pretrained(
        folder, config=config, tp_plan="auto", device_mesh=mesh["tp"], **common
    )
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    cut = frozenset(n for n, parameter in part.named_parameters() if parameter.shape != shapes[n])
    return part, cut, None


def _add_factors(model: torch.nn.Module, lora: Any) -> None:
    """Put LoRA's factors into the layers; on a model without memory they have none."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora, model, low_cpu_mem_usage=next(model.parameters()).is_meta)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _set_for_reinforcement_learning(config: Any) -> None:
    """Log-probabilities must depend on the tokens alone."""
    for each in (config, config.get_text_config()):
        for name, value in vars(each).items():
            random = "dropout" in name or "layerdrop" in name or name.endswith("_pdrop")
            if random and isinstance(value, float):
                setattr(each, name, 0.0)


def _layers(model: Any) -> list[torch.nn.Module]:
    """The modules that transformers says must not be split, its decoder layers; inner ones first."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise ValueError(
            f"transformers does not tell the layers of {type(model).__name__} (_no_split_modules), so FSDP would gather "
            "the whole model at once; take a model that it does tell them of"
        )
    # Outer units come first, so that what is left is the innermost unit of each module.
    unit_of = {id(module): unit for unit in (model, *found) for module in unit.modules()}
    owners: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if owners.setdefault(id(parameter), unit_of[id(module)]) is not unit_of[id(module)]:
                raise ValueError(
                    f"{type(model).__name__} ties {name}.{key} to a parameter of another layer, and FSDP would train the "
                    "two apart; train it with Megatron"
                )
    return found[::-1]


def _precise_modules(model: Any, dtype: torch.dtype) -> list[torch.nn.Module]:
    """The modules whose parameters transformers keeps in FP32 when layers compute in ``dtype``, and which have it now.

    Raises:
        ValueError: a module has such parameters beside others; lists all.
    """
    precise = kept_in_float32(model, dtype)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if precise(name) and tensor.is_floating_point():
                tensor.data = tensor.data.float()
    found: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        inside = any(path.startswith(f"{outer}.") for outer in found)
        # FSDP gathers on the call of a module, and containers are never called.
        called = not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)
        if names and called and not inside and all(map(precise, names)):
            found[path] = module
    left = [
        name
        for name, _ in model.named_parameters()
        if precise(name) and not any(name.startswith(f"{path}.") for path in found)
    ]
    if left:
        shown = ", ".join(left[:5]) + (" …" if len(left) > 5 else "")
        raise ValueError(
            f"transformers keeps {len(left)} parameters of {type(model).__name__} in float32, beside others of the same "
            f"module: {shown}. FSDP would gather them in {dtype}, and the trainer compute something else than the engine; "
            "give dtype float32, or train it with Megatron"
        )
    return list(found.values())


def _materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give tensors without memory some on ``device``; a tensor that is tied stays so."""
    made: dict[int, torch.Tensor] = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for key, tensor in tensors.items():
                if tensor is None or not tensor.is_meta or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, tensor.requires_grad)
                    made[id(tensor)] = empty
                tensors[key] = made[id(tensor)]


def _fill(model: torch.nn.Module, loaded: torch.nn.Module | None, device: torch.device) -> None:
    """Hand the weights and buffers of rank 0's ``loaded`` to all ranks, one at a time."""
    values = {} if loaded is None else {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    with torch.no_grad():
        for name, live in (*model.named_parameters(), *model.named_buffers()):
            whole = torch.empty(live.shape, dtype=live.dtype, device=device)
            if loaded is not None:
                whole.copy_(values[name])
            dist.broadcast(whole, 0)
            if isinstance(live, DTensor):
                part = distribute_tensor(whole, live.device_mesh, live.placements, src_data_rank=None)
                live.to_local().copy_(part.to_local())
            else:
                live.copy_(whole)
