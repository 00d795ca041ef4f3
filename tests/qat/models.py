"""Tiny models in NVFP4 training, in the test's own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.nvfp4 import Arithmetic
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.model import QAT

from .ranks import token_ids


def trainer(checkpoint: Path, **config: Any) -> tuple[nn.Module, QAT]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    qat = quantize_module(model, QATConfig(**config))
    if qat.config.activations and not qat.config.force_dynamic_quantization:
        with torch.no_grad(), qat.calibrating():
            model(token_ids())
    qat.refresh()
    return model, qat


def train(model: nn.Module, qat: QAT, steps: int, lr: float = 3e-3) -> list[float]:
    ids = token_ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qat.refresh()
        losses.append(loss.item())
    return losses


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def dequantized(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A plain model of what a checkpoint holds, read by vLLM's function, whose linear layers quantize their inputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = read(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    state = {name: t for name, t in tensors.items() if not name.endswith(("_scale", "_scale_2"))}
    for name, packed in state.items():
        if packed.dtype == torch.uint8:
            module = name.removesuffix(".weight")
            scales = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"]
            state[name] = dequantize_to_dtype(packed, *scales, dtype, swizzle=False)
            if (input_scale := tensors.get(f"{module}.input_scale")) is not None:
                _quantize_inputs(model.get_submodule(module), input_scale)
    model.load_state_dict(state)
    return model


def _quantize_inputs(module: nn.Module, scale: torch.Tensor) -> None:
    def quantized(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return nvfp4.fake_quantize(arguments[0], scale, Arithmetic.ACTIVATIONS), *arguments[1:]

    module.register_forward_pre_hook(quantized)
