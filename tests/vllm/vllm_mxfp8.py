"""Checkpoints in MXFP8, and vLLM's kernels for them on a CPU, where their loading and processing is Python.

Marlin's one function in CUDA is :mod:`tests.marlin`'s. The emulation could compute here, too, but vLLM has it for GPUs alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_checkpoints import read_checkpoint

from rlrefit.integration.quantize import mxfp8
from tests.marlin import gptq_marlin_repack

EMULATION, MARLIN, FLASHINFER = "emulation", "marlin", "flashinfer"
_KERNELS = {
    EMULATION: "EmulationMxfp8LinearKernel",
    MARLIN: "MarlinMxfp8LinearKernel",
    FLASHINFER: "FlashInferCutlassMxfp8LinearKernel",
}


def quantize_to_mxfp8(path: Path, config: dict[str, Any]) -> None:
    """Turn a Qwen3 checkpoint into one whose decoder layers' matrices are MXFP8; ``config`` is its ``quantization_config``."""
    tensors = {}
    for name, tensor in read_checkpoint(str(path)).items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale"] = mxfp8.quantize(tensor)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(told))


def of_modelopt() -> dict[str, Any]:
    """``quantization_config`` as ModelOpt writes it."""
    return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}


def of_compressed_tensors() -> dict[str, Any]:
    """The same as llm-compressor writes it."""
    numbers = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp[.]gate$"],
    }


def choose_mxfp8_kernel(kernel: str) -> None:
    """Have this process's vLLM hold MXFP8 for ``kernel``, and experts for Marlin."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8
    from vllm.platforms import current_platform

    chosen = getattr(linear, _KERNELS[kernel])
    chosen.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear._POSSIBLE_MXFP8_KERNELS[current_platform._enum] = [chosen]
    MarlinExperts._supports_current_device = staticmethod(lambda: True)
    _custom_ops.gptq_marlin_repack = gptq_marlin_repack
    marlin_utils_fp8.marlin_make_workspace_new = lambda *_: torch.zeros(4, dtype=torch.int)
