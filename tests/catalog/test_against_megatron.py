"""The trainer's side of the catalogue beside what Megatron-core and Megatron-Bridge really build."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.plan.catalog import Model, Param, TrainLayout, train_storage
from rlrefit.recipes.plan.catalog.sections import language_model

from .real import ask
from .shrunken import CONFIGS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
}
_ONE = TrainLayout(vocabulary_multiple=8)
_CASES: list[tuple[str, TrainLayout, int]] = [
    *((name, _ONE, 0) for name, config in CONFIGS.items() if config["model_type"] in ARCHITECTURES),
    ("llama", TrainLayout(tp=4, pp=2, vocabulary_multiple=8), 3),
    ("llama", TrainLayout(tp=2, pp=2, vpp=2, dp=2, vocabulary_multiple=8), 5),
    ("llama", TrainLayout(pp=3, last=2, vocabulary_multiple=8), 1),
    ("llama", TrainLayout(pp=3, last=1, first=1, vocabulary_multiple=8), 2),
    ("llama-tied", TrainLayout(tp=2, pp=2, vocabulary_multiple=64), 1),
    ("llama-tied", TrainLayout(tp=2, pp=2, vocabulary_multiple=64), 3),
    ("qwen2", TrainLayout(tp=2, cp=2, vocabulary_multiple=8), 3),
    ("qwen3", TrainLayout(tp=8, vocabulary_multiple=8), 5),
    ("qwen3_moe", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 6),
    ("qwen3_moe", TrainLayout(tp=2, ep=2, etp=2, cp=2, dp=2, vocabulary_multiple=8), 5),
    ("qwen3_moe", TrainLayout(tp=2, pp=2, ep=2, dp=2, vocabulary_multiple=8), 7),
    ("deepseek_v3", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 2),
    ("deepseek_v3", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
    ("glm4_moe", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
    ("nemotron_h", TrainLayout(tp=2, vocabulary_multiple=8), 1),
    ("nemotron_h", TrainLayout(pp=5, vocabulary_multiple=8), 3),
    ("nemotron_h", TrainLayout(tp=2, pp=5, vocabulary_multiple=8), 9),
    ("gpt_oss", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 3),
    ("gemma3_text", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 3),
    ("gemma4", TrainLayout(tp=2, vocabulary_multiple=8), 1),
    ("gemma4", TrainLayout(tp=4, vocabulary_multiple=8), 3),
    ("gemma4-shared", TrainLayout(tp=4, dp=2, vocabulary_multiple=8), 6),
    ("gemma4-moe", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
    ("gemma4-moe", TrainLayout(tp=2, ep=2, etp=2, vocabulary_multiple=8), 3),
    ("minimax_m2", TrainLayout(tp=4, ep=4, vocabulary_multiple=8), 2),
    ("minimax_m2", TrainLayout(tp=8, ep=2, vocabulary_multiple=8), 5),
    ("nemotron_h-latent", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
    ("qwen3_next", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 6),
    ("qwen3_5_text", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 3),
    ("qwen3_5_moe", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 1),
    ("qwen3_5_moe", TrainLayout(tp=2, pp=2, ep=2, etp=2, vocabulary_multiple=8), 7),
    ("qwen3_vl", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 1),
    ("qwen3_vl", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 3),
    ("qwen3_vl_moe", TrainLayout(tp=2, ep=2, etp=2, vocabulary_multiple=8), 3),
    ("qwen2_5_vl", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 1),
    ("gemma3", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 1),
    ("gemma3", TrainLayout(tp=2, pp=2, vocabulary_multiple=8), 3),
    ("glm4_moe_lite", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
    ("glm_moe_dsa", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 3),
    ("bailing_moe_v2", TrainLayout(tp=4, ep=4, vocabulary_multiple=8), 3),
    ("kimi_k25", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 1),
    ("kimi_k25", TrainLayout(tp=2, pp=2, ep=4, vocabulary_multiple=8), 7),
]
# Whether the checkpoint has experts in one tensor, how it names Gemma 3's encoder, and whether layers that share keys have some of their
# own, as Gemma 4's are published, Bridge knows by the names that it finds.
_BY_NAMES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "gemma3", "gemma4-shared")


def _label(case: tuple[str, TrainLayout, int]) -> str:
    name, layout, rank = case
    sizes = [f"{key}{size}" for key, size in asdict(layout).items() if size not in (None, 1)]
    return "-".join([name, *sizes[:-1], f"rank{rank}"])


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    models = {name: Model(name, CONFIGS[name]).specs() for name, _, _ in _CASES}
    cases = [
        {
            "config": CONFIGS[name],
            "architecture": ARCHITECTURES[CONFIGS[name]["model_type"]],
            "layout": asdict(layout),
            "rank": rank,
            "world": layout.world_size,
            "specs": layout is _ONE,
            "exported": {spec.name: spec.shape for spec in models[name]},
            "names": [spec.name for spec in models[name]] if name in _BY_NAMES else None,
        }
        for name, layout, rank in _CASES
    ]
    return ask("real_megatron", cases, {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("index", range(len(_CASES)), ids=[_label(case) for case in _CASES])
def test_a_trainer_rank_stores_what_the_catalogue_says(index: int, real: list[dict[str, Any]]) -> None:
    name, layout, rank = _CASES[index]
    model = Model(name, CONFIGS[name])
    stored = {param.name: param for param in train_storage(model, layout, rank)}
    theirs = {param["name"]: param for param in real[index]["params"]}
    if CONFIGS[name].get("tie_word_embeddings") and layout.pp > 1:
        for inside in ("", "language_model."):
            stored.pop(f"{inside}output_layer.weight", None)  # the copy, for which Bridge makes no task
    assert stored.keys() == theirs.keys()
    for key, param in stored.items():
        if param.parts and param.refused:
            param = replace(param, refused=(), reason="")  # copies, which no mapping names
        assert _as_data(param) == theirs[key], key


@pytest.mark.parametrize(
    "index",
    [i for i, (_, layout, _) in enumerate(_CASES) if layout is _ONE],
    ids=[name for name, layout, _ in _CASES if layout is _ONE],
)
def test_weights_stand_in_the_order_of_bridges_export(index: int, real: list[dict[str, Any]]) -> None:
    name = _CASES[index][0]
    config = language_model(CONFIGS[name])
    padded = -(-config["vocab_size"] // 8) * 8
    exported = []
    for spec in map(TensorSpec.from_json, real[index]["specs"]):
        # Bridge exports the padding too; the source of the refit trims it.
        rows = config["vocab_size"] if spec.shape[0] == padded else spec.shape[0]
        if config["tie_word_embeddings"] and spec.name == "lm_head.weight":
            continue  # repeated only where a checkpoint has it, or where there is none, as here
        exported.append(spec._replace(shape=(rows, *spec.shape[1:])))
    ours = Model(name, CONFIGS[name]).specs()
    assert ours == exported


def _as_data(param: Param) -> dict[str, Any]:
    storage = torch.empty(param.shape, device="meta")
    parts = []
    for part in param.parts:
        view = storage[part.index].T if part.turned else storage[part.index]
        # The stride of a dimension of one element says nothing.
        strides = [step if n > 1 else 0 for step, n in zip(view.stride(), view.shape, strict=True)]
        place = [view.storage_offset(), strides, list(view.shape)]
        axes = part.axes and [[list(factors) for factors in part.axes.splits], list(part.axes.order)]
        parts.append([part.name, list(part.full_shape), [list(side) for side in part.box], place, axes])
    return {
        "name": param.name,
        "shape": list(param.shape),
        "dtype": str(param.dtype),
        "refused": sorted(param.refused),
        "reason": param.reason,
        "parts": parts,
    }
