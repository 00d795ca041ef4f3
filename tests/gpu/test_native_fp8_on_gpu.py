"""Parameters that Transformer Engine keeps in FP8 blocks: what is sent stands for what Bridge exports."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.spawn import free_port

from .needs import needs

pytestmark = needs("megatron", "transformer_engine", "transformers", capability=(9, 0))


def compare(folder: str, port: int, results: Any) -> None:
    try:
        results.put(compared(folder, port))
    except Exception:
        results.put(traceback.format_exc())
        raise


def compared(folder: str, port: int) -> dict[str, Any]:
    import torch.distributed as dist

    from rlrefit.integration.quantize import fp8_blockwise
    from rlrefit.integration.quantize.formats import Fp8Blockwise
    from rlrefit.integration.weights.quantizing import QuantizingSource
    from rlrefit.workers.trainers.megatron.model import (
        MegatronLayout,
        ensure_megatron,
        set_layout,
        set_precision,
    )
    from rlrefit.workers.trainers.megatron.native_fp8 import is_native
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    bridge = ensure_megatron().from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    set_layout(provider, MegatronLayout())
    set_precision(provider, torch.bfloat16)
    provider.gradient_accumulation_fusion = False
    provider.fp8, provider.fp8_recipe, provider.fp8_param = "e4m3", "blockwise", True
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_hf_weights(model)

    source = MegatronSource(bridge, model)
    native = [weight for chunk in model for weight in chunk.parameters() if is_native(weight)]
    linear = {s.name for s in source.specs() if len(s.shape) == 2 and "_proj" in s.name}
    quantizing = QuantizingSource(source, dict.fromkeys(linear, Fp8Blockwise()))
    found: dict[str, Any] = {"native": len(native), "linear": sorted(linear)}
    for turn in ("first", "changed"):
        if turn == "changed":
            for weight in native:
                weight.quantize_(torch.randn(weight.shape, dtype=torch.bfloat16, device="cuda"))
        fragments, refused = quantizing.fragments()
        codes = {f.name: torch.zeros(f.full_shape, device="cuda").to(torch.float8_e4m3fn) for f in fragments}
        scales = {
            f.name: torch.zeros(f.full_shape, device="cuda")
            for f in fragments
            if f.name.endswith("_scale_inv")
        }
        for fragment in fragments:
            whole = scales.get(fragment.name, codes[fragment.name])
            part = tuple(slice(start, stop) for start, stop in fragment.box)
            if fragment.encoding is None and (fragment.name in linear or fragment.name in scales):
                whole[part].view(torch.uint8).copy_(fragment.view.contiguous().view(torch.uint8))
        sent = Counter(f.encoding is None for f in fragments if f.name in linear)
        found[turn] = {
            "refused": refused,
            "as they are": sent[True],
            "wrong": [
                name
                for name, weight in source.export(sorted(linear))
                if name not in refused
                and not torch.equal(
                    fp8_blockwise.dequantize(codes[name], scales[f"{name}_scale_inv"], dtype=weight.dtype),
                    weight,
                )
            ],
        }
    dist.destroy_process_group()
    return found


def test_codes_and_scales_that_are_sent_as_they_are_stand_for_bridges_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=compare, args=(str(tmp_path / "model"), free_port(), results))
    process.start()
    found = results.get(timeout=240)
    process.join(60)
    assert not isinstance(found, str), found
    assert found["native"] == 8
    assert len(found["linear"]) == 14
    for turn in ("first", "changed"):
        assert found[turn]["refused"] == {}
        assert found[turn]["as they are"] > 0
        assert found[turn]["wrong"] == []
