"""Train a model that knows of NVFP4, and export the checkpoint that vLLM and TensorRT-LLM load.

A tiny Qwen3 with random weights learns a few sentences with fake-quantized linear layers (W4A4), first with inputs
observed, then with them quantized too. Its checkpoint is read back without rlrefit's training code: the model of what
is in it must give the trained model's logits, bit for bit.

    python examples/qat_nvfp4.py                  # one process, any machine, under a minute on two cores
    python examples/qat_nvfp4.py --out FOLDER     # keeps the checkpoint

docs/nvfp4.md tells the calls under FSDP2 and Megatron, and how an engine is refitted.

On a GPU without FP4 units vLLM serves it with weights alone in four bits; on a CPU, slowly, with all of it:
``VLLM_NVFP4_GEMM_BACKEND=emulation python -m vllm.entrypoints.openai.api_server --model FOLDER --enforce-eager``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlrefit.integration.quantize import nvfp4
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module

STEPS = 12
TEXTS = [f"max({a},{b})={max(a, b)}" for a in range(4) for b in range(4)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the checkpoint; must not exist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        original = make_checkpoint("qwen3", Path(scratch) / "qwen3")
        out = arguments.out or Path(scratch) / "qwen3-nvfp4"
        return run(original, out)


def run(original: Path, out: Path) -> int:
    """Train, export, and compare."""
    tokenizer = AutoTokenizer.from_pretrained(original)
    ids = torch.tensor(tokenizer(TEXTS)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)

    qat = quantize_module(model, QATConfig())  # under FSDP2: here, or after fully_shard
    with torch.no_grad(), qat.calibrating():  # once: the ranges of the layers' inputs
        model(ids)
    qat.refresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qat.refresh()  # after each step, on all ranks: the global scales of the new weights
        losses.append(loss.item())
        print(f"step {step + 1:2}: loss {losses[-1]:.3f}")

    write_checkpoint(out, original, FSDPSource(model, torch.float32), qat)
    sizes = {path: sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in (original, out)}
    print(f"{len(qat.weights)} weights in NVFP4: {sizes[out]:,} bytes, {sizes[original]:,} in BF16")

    with torch.no_grad():
        trained, exported = model(ids).logits, read(out)(ids).logits
    equal = torch.equal(trained, exported)
    learned = losses[-1] < losses[0] / 2
    print(f"the checkpoint's logits {'are' if equal else 'are NOT'} the trained model's, bit for bit")
    print("the loss went down" if learned else "the loss did NOT go down")
    return 0 if equal and learned else 1


def read(folder: Path) -> Any:
    """A plain transformers model of what the checkpoint holds, whose linear layers quantize their inputs as engines do."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    state = {name: t for name, t in tensors.items() if not name.endswith(("_scale", "_scale_2"))}
    for name in [name for name, tensor in state.items() if tensor.dtype == torch.uint8]:
        module = name.removesuffix(".weight")
        scales = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"]
        state[name] = nvfp4.dequantize(state[name], *scales)
        input_scale = tensors[f"{module}.input_scale"]

        def quantized(_: Any, inputs: tuple[torch.Tensor], scale: torch.Tensor = input_scale) -> torch.Tensor:
            return nvfp4.fake_quantize(inputs[0], scale, nvfp4.Arithmetic.ACTIVATIONS)

        model.get_submodule(module).register_forward_pre_hook(quantized)
    model.load_state_dict(state)
    return model


if __name__ == "__main__":
    raise SystemExit(main())
