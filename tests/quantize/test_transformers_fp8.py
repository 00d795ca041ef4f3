"""A transformers engine that holds FP8 blocks computes with what the trainer's codes and scales stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from rlrefit.integration.layout import box_of
from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.loader_trace.quantized import on_the_wire
from rlrefit.workers.engines.transformers.destination import TransformersFp8Destination
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from tests.delta import scene
from tests.refit.synthetic import SyntheticSource, move, run_world, value_of

from .test_quantized_refit import config

BF16 = torch.bfloat16
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "max_position_embeddings": 32,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 136}


def _model(experts: bool) -> Any:
    config = Qwen3MoeConfig(**_SIZES, **_EXPERTS) if experts else Qwen3Config(**_SIZES)
    return AutoModelForCausalLM.from_config(config).to(BF16).requires_grad_(False)


def _quantized(spec: TensorSpec) -> bool:
    kinds = ("self_attn.", "mlp.experts.", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return len(spec.shape) == 2 and any(kind in spec.name for kind in kinds)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast"])
def test_the_model_has_the_values_of_fp8_after_every_refit(experts: bool, engine: str) -> None:
    model = _model(experts)
    # Names and shapes of the checkpoint, as a trainer under FSDP exports them.
    specs = FSDPSource(_model(experts)).specs()
    source = SyntheticSource(specs, {spec.name: [box_of(spec.shape)] for spec in specs})
    destination = TransformersFp8Destination(model, 0, 1)

    def body(rank: int, session: Any, end: Any) -> Any:
        wrong = []
        for version in (1, 2, 3):
            if rank == 0:
                source.set_version(version)
            else:
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            session.refit(version)
            held = {} if rank == 0 else {f.name: f.view for f in FSDPSource(model).fragments()[0]}
            for spec in specs if rank else ():
                value = value_of(spec, version)
                if _quantized(spec):
                    value = fp8_blockwise.dequantize(*fp8_blockwise.quantize(value), dtype=BF16)
                if not torch.equal(held[spec.name], value):
                    wrong.append((version, spec.name))
        return wrong, {entry.spec.name: entry.route for entry in session.manifest}

    results = run_world([source], [destination], body, config(), engine=engine)
    assert [wrong for wrong, _ in results] == [[], []]
    routes = results[0][1]
    scales = {name for name in routes if name.endswith("_scale_inv")}
    assert scales == {f"{spec.name}_scale_inv" for spec in specs if _quantized(spec)}
    if engine == "nccl_xfer":
        assert set(routes.values()) <= {"bulk", "unused"}
    codes = sum(spec.nbytes // 2 for spec in specs if _quantized(spec))
    assert destination.kept_bytes < sum(p.nbytes for p in model.parameters()) - codes + 4096


def test_scales_are_held_in_float32_whatever_the_default_dtype_of_the_process_is() -> None:
    model, specs = _model(experts=True), FSDPSource(_model(experts=True)).specs()
    destination = TransformersFp8Destination(model, 0, 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        formats = destination.quantized(specs)
        held, _ = destination.fragments(on_the_wire(specs, formats))
    finally:
        torch.set_default_dtype(before)
    scales = [fragment.view.dtype for fragment in held if fragment.name.endswith("_scale_inv")]
    assert scales == [torch.float32] * len(formats)


def test_the_model_has_the_values_of_fp8_after_sparse_refits_also_once_a_trainer_was_followed() -> None:
    model = _model(experts=True)
    specs = FSDPSource(_model(experts=True)).specs()
    source = scene.Source(specs, {spec.name: [box_of(spec.shape)] for spec in specs})
    codes = {spec.name for spec in specs if _quantized(spec)}

    def body(rank: int, session: Any, end: Any) -> Any:
        wrong, shares = [], []
        for version in (1, 2, 3):
            if rank == 0:
                source.set_version(version)
                if version == 3:
                    move(source)
            elif version > 1:
                # What stands for codes is made anew each time, by all of them.
                for fragment in FSDPSource(model).fragments()[0]:
                    if fragment.name in codes:
                        fragment.view.fill_(float("nan"))
            shares.append(session.refit(version).changed_share)
            held = {} if rank == 0 else {f.name: f.view for f in FSDPSource(model).fragments()[0]}
            for spec in specs if rank else ():
                value = scene.value(spec, source.share, version)
                if spec.name in codes:
                    value = fp8_blockwise.dequantize(*fp8_blockwise.quantize(value), dtype=BF16)
                if not torch.equal(held[spec.name], value):
                    wrong.append((version, spec.name))
        return wrong, [share is not None and 0 < share < 0.05 for share in shares]

    results = run_world(
        [source],
        [TransformersFp8Destination(model, 0, 1)],
        body,
        config(delta="always"),
    )
    assert results == [([], [False, True, True])] * 2
