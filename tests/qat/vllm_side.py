"""vLLM's own NVFP4 layers and loaders on a CPU: one rank of a tensor-parallel engine, in a process of its own."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

RANK, RANKS = 1, 2
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NVFP4_GEMM_BACKEND": "emulation",  # the one that needs no kernels
}
_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def digests_of(model: torch.nn.Module) -> dict[str, str]:
    """Of all parameters, by name."""
    return {name: sha256(_raw(held.data).numpy()).hexdigest() for name, held in model.named_parameters()}


def loaded_digests(path: str) -> dict[str, str]:
    """:func:`digests_of` the model that vLLM itself loads from a checkpoint, on one rank."""
    # As in the engine's worker: from 0.26 on vLLM has NVFP4 on CPUs by what the extension registers.
    import rlrefit.workers.engines.vllm.extension  # noqa: F401

    return digests_of(_loaded(path, 0, 1)[0])


def _loaded(path: str, rank: int, ranks: int) -> tuple[torch.nn.Module, Any]:
    """The model as vLLM has it on one of these ranks, and its configuration."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm_ranks import Case, Layout, _config

    from tests.catalog.real_vllm import _stand_in_for_groups

    _stand_in_for_groups(
        {"groups": {"tp": (rank, ranks), "pp": (0, 1), "dp": (0, 1), "ep": (0, 1), "pcp": (0, 1)}}
    )
    config = _config(path, Case(path, path, Layout()))
    config.parallel_config.tensor_parallel_size = ranks
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def serve(path_a: str, path_b: str, with_experts: str) -> dict[str, Any]:
    """Load A, refit to B and back, compute with the layers of what vLLM itself loads from B; load experts."""
    _make_workspaces()
    _pack_plain_weights()
    live, config = _loaded(path_a, RANK, RANKS)  # which adds the folder of these two modules to the path
    from vllm.config import set_current_vllm_config
    from vllm_checkpoints import manifest_of, read_checkpoint
    from vllm_ranks import _differing

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    a, b = read_checkpoint(path_a), read_checkpoint(path_b)
    expected, _ = _loaded(path_b, RANK, RANKS)
    destination = VllmDestination(live, config, torch.device("cpu"))
    packed = manifest_of(a)
    left_out = "model.layers.0.mlp.down_proj"
    found: dict[str, Any] = {
        "without input scales": _refusal(
            destination, [entry for entry in packed if not entry[0].endswith("input_scale")]
        ),
        "a layer left out": _refusal(
            destination,
            [entry for entry in packed if not entry[0].startswith(left_out)]
            + [(f"{left_out}.weight", _unpacked(a[f"{left_out}.weight"]), torch.bfloat16)],
        ),
    }
    fragments, misc = destination.fragments(packed)
    found |= {"changed": bool(_differing(live, expected)), "misc": misc}
    workspaces = _workspaces(live)
    for version, (tensors, oracle) in enumerate(
        ((b, expected), (a, _loaded(path_a, RANK, RANKS)[0])), start=1
    ):
        for parameter in live.parameters():
            parameter.data.view(-1).view(torch.uint8).fill_(0x7F)  # NaN in every float
        for fragment in fragments:
            fragment.view.copy_(tensors[fragment.name][tuple(slice(i, j) for i, j in fragment.box)])
        destination.load_weights((name, tensors[name]) for name in misc)
        destination.finish(version)
        found[f"differing after {version}"] = _differing(live, oracle)
    found["workspaces"] = [len(workspaces), workspaces == _workspaces(live)]
    with set_current_vllm_config(config):
        return found | _products(expected, b) | {"fused": _fused()} | _experts(with_experts)


def _make_workspaces() -> None:
    """Have the kernel make what Marlin's makes each time beside the parameters of a layer."""
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel

    original = EmulationNvFp4LinearKernel.process_weights_after_loading

    def process(kernel: Any, layer: Any) -> None:
        original(kernel, layer)
        layer.workspace = torch.zeros(4, dtype=torch.int)

    EmulationNvFp4LinearKernel.process_weights_after_loading = process


def _pack_plain_weights() -> None:
    """Have vLLM compute with a packed copy of a plain weight on every CPU; oneDNN packs BF16 on some alone."""
    from vllm import _custom_ops

    _custom_ops.create_onednn_mm = lambda weight, cache_size: weight.clone()
    _custom_ops.onednn_mm = lambda packed, x, bias: torch.nn.functional.linear(x, packed.t(), bias)


def _workspaces(model: torch.nn.Module) -> dict[str, int]:
    """Where they are, by layer."""
    return {n: m.workspace.data_ptr() for n, m in model.named_modules() if hasattr(m, "workspace")}


def _unpacked(codes: torch.Tensor) -> tuple[int, int]:
    """The shape of the weight."""
    return codes.shape[0], 2 * codes.shape[1]


def _refusal(destination: Any, manifest: Any) -> str:
    """What is said of a trainer that brings these, and not what the engine's packed layers need."""
    from rlrefit.integration.errors import PlanError

    try:
        destination.fragments(manifest)
    except PlanError as error:
        return str(error)
    return ""


def _experts(path: str) -> dict[str, Any]:
    """What vLLM's loader leaves wrong in the experts of a layer, by parameter."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_checkpoints import read_checkpoint
    from vllm_ranks import Case, Layout, _config

    # No kernel of vLLM's computes NVFP4 experts on CPUs; one has to be named for the parameters to be made.
    modelopt.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.VLLM_CUTLASS, None)
    config = _config(path, Case(path, path, Layout()))
    config.parallel_config.tensor_parallel_size = RANKS
    tensors = read_checkpoint(path)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config)
        for parameter in model.parameters():
            parameter.data.view(-1).view(torch.uint8).fill_(0x7F)
        model.load_weights(tensors.items())
    found = {n: p for n, p in model.named_parameters() if "layers.1.mlp.experts.w" in n}
    wrong = [
        name for name, p in found.items() if not torch.equal(_raw(p.data), _raw(_stacked(tensors, name)))
    ]
    return {"expert_parameters": sorted(name.rpartition(".")[2] for name in found), "wrong_experts": wrong}


def _stacked(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """This rank's part of the experts of layer 1: rows of gate and up beside each other, columns of down."""
    path, _, kind = name.rpartition(".")
    stack, _, end = kind.partition("_")
    parts, side = (("gate_proj", "up_proj"), 0) if stack == "w13" else (("down_proj",), 1)
    experts = []
    for expert in range(8):
        found = [tensors[f"{path}.{expert}.{part}.{end}"] for part in parts]
        if found[0].dim():
            experts.append(torch.cat([_bytes(tensor.chunk(RANKS, side)[RANK]) for tensor in found]))
        else:
            experts.append(torch.stack(found) if stack == "w13" else found[0])
    return torch.stack(experts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return _bytes(tensor.reshape(-1))


def _fused() -> list[tuple[str, list[str]]]:
    """What vLLM's models of some families hold in one matrix, and its parts."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    models: list[Any] = [DeepseekV2ForCausalLM, LlamaForCausalLM, Qwen3MoeForCausalLM]
    return [item for model in models for item in model.packed_modules_mapping.items()]


def _products(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For each layer of the first block: its kind, and how far its products are from those of training."""
    methods, apart = set(), {}
    for name in _LAYERS:
        layer: Any = model.get_submodule(f"model.layers.0.{name}")
        methods.add(type(layer.quant_method).__name__)
        x = torch.randn(5, layer.input_size_per_partition, generator=torch.Generator().manual_seed(1))
        theirs = layer.quant_method.apply(layer, x.bfloat16())
        difference = (theirs - _ours(tensors, name, x.bfloat16())).abs().max()
        apart[name] = float(difference / theirs.abs().max())
    return {"methods": methods, "apart": apart}


def _ours(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """What the trainer's layer computes for this rank's part."""
    from rlrefit.integration.quantize import nvfp4
    from rlrefit.workers.trainers.qat.functions import fake_input

    path, _, last = name.rpartition(".")
    outs = []
    for part in _PARTS.get(last, (last,)):
        module = f"model.layers.0.{path}.{part}"
        packed, scales, scale_2 = (
            tensors[f"{module}.{end}"] for end in ("weight", "weight_scale", "weight_scale_2")
        )
        weight = nvfp4.dequantize(packed, scales, scale_2, torch.bfloat16)
        weight = weight.chunk(RANKS, 0 if last in _PARTS else 1)[RANK]
        outs.append(fake_input(x, tensors[f"{module}.input_scale"]) @ weight.t())
    return torch.cat(outs, -1)
