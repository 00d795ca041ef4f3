"""The engine's side of the catalogue beside what vLLM's own models and loaders do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.quantize.formats import Fp8Blockwise, Int4, Nvfp4
from rlrefit.integration.quantize.nvfp4_checkpoint import quantization_config
from rlrefit.integration.weights.manifest import dtype_name
from rlrefit.recipes.plan.catalog import GenLayout, Model, Param, gen_storage
from rlrefit.recipes.rollout.arguments import int4
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED
from tests.ahead import FoundAhead
from tests.vllm_processes import vllm_processes

from .real import ask
from .shrunken import BLOCK_CONFIGS, CONFIGS
from .test_against_megatron import ARCHITECTURES

_CASES: list[tuple[str, GenLayout, int]] = [
    ("llama", GenLayout(tp=2, pp=3), 3),
    ("llama-tied", GenLayout(tp=2, pp=2), 2),
    ("qwen2", GenLayout(tp=4), 3),
    ("qwen3", GenLayout(tp=8), 5),
    ("qwen3_moe", GenLayout(tp=4), 2),
    ("qwen3_moe", GenLayout(tp=2, ep=2, pp=2), 1),
    ("qwen3_moe", GenLayout(tp=2, dp=3, ep=6), 4),
    ("deepseek_v3", GenLayout(tp=4), 3),
    ("deepseek_v3", GenLayout(tp=4, ep=4), 1),
    ("deepseek_v3-no-q-rank", GenLayout(tp=2), 1),
    ("glm4_moe", GenLayout(tp=4, ep=4), 1),
    ("gpt_oss", GenLayout(tp=2), 1),
    ("deepseek_v3", GenLayout(tp=2, pp=2), 3),
    ("gpt_oss", GenLayout(tp=2, pp=2), 2),
    ("nemotron_h", GenLayout(tp=4), 2),
    ("nemotron_h", GenLayout(tp=2, pp=2), 3),
    ("mistral", GenLayout(tp=2), 1),
    ("gemma2", GenLayout(tp=2, pp=2), 2),
    ("gemma3_text", GenLayout(tp=2), 1),
    ("gemma4", GenLayout(tp=4), 3),
    ("gemma4", GenLayout(tp=2, pp=2), 2),
    ("gemma4-shared", GenLayout(tp=2), 1),
    ("gemma4-shared", GenLayout(tp=4), 3),
    ("gemma4-moe", GenLayout(tp=4, ep=4), 1),
    ("gemma4-moe", GenLayout(tp=2, pp=2), 2),
    ("minimax_m2", GenLayout(tp=4, ep=4), 1),
    ("minimax_m2", GenLayout(tp=8), 5),
    ("nemotron_h-latent", GenLayout(tp=2, ep=2), 1),
    ("nemotron_h-experts", GenLayout(tp=2, pp=2), 1),
    ("qwen3_next", GenLayout(tp=2, pp=2), 3),
    ("qwen3_next", GenLayout(tp=4, ep=4), 3),
    ("qwen3_5_text", GenLayout(tp=4), 1),
    ("qwen3_5_moe_text", GenLayout(tp=2), 1),
    ("qwen3_5", GenLayout(tp=2, pp=2), 2),
    ("qwen3_5_moe", GenLayout(tp=2, ep=2, pp=2), 3),
    ("qwen3_vl", GenLayout(tp=4), 3),
    ("qwen3_vl_moe", GenLayout(tp=4), 1),
    ("qwen3_vl_moe", GenLayout(tp=2, ep=2), 1),
    ("qwen2_5_vl", GenLayout(tp=2, pp=2), 3),
    ("gemma3", GenLayout(tp=2), 1),
    ("gemma3", GenLayout(tp=2, pp=2), 2),
    ("glm4_moe_lite", GenLayout(tp=4, ep=4), 1),
    ("glm_moe_dsa", GenLayout(tp=2), 1),
    ("bailing_moe_v2", GenLayout(tp=8), 3),
    ("bailing_moe_v2", GenLayout(tp=2, pp=2), 2),
    ("kimi_k25", GenLayout(tp=4, ep=4), 1),
    ("kimi_k25", GenLayout(tp=2, pp=2), 2),
]
# The same in blocks of FP8.
_BLOCK_CASES: list[tuple[str, GenLayout, int]] = [
    ("llama", GenLayout(tp=2), 1),
    ("qwen2", GenLayout(), 0),
    ("qwen3", GenLayout(tp=4), 3),
    ("qwen3_moe", GenLayout(tp=2), 1),
    ("qwen3_moe", GenLayout(tp=2, ep=2), 1),
    ("deepseek_v3", GenLayout(tp=2), 1),
    ("deepseek_v3", GenLayout(tp=2, ep=2, pp=2), 3),
]
# And in INT4.
_INT4_CASES: list[tuple[str, GenLayout, int]] = [
    ("llama", GenLayout(tp=2, pp=2), 3),
    ("qwen2", GenLayout(tp=2), 1),
    ("qwen3", GenLayout(tp=4), 2),
    ("qwen3_moe", GenLayout(tp=4), 3),
    ("qwen3_moe", GenLayout(tp=2, ep=2), 1),
    ("deepseek_v3", GenLayout(tp=4), 3),
    ("deepseek_v3", GenLayout(tp=2, ep=2, pp=2), 3),
]
# In NVFP4 with inputs, and with weights alone.
_W4A4_CASES: list[tuple[str, GenLayout, int]] = [
    ("llama", GenLayout(tp=2, pp=2), 3),
    ("qwen3", GenLayout(tp=4), 2),
    ("qwen3_moe", GenLayout(tp=4), 3),
    ("qwen3_moe", GenLayout(tp=2, ep=2), 1),
]
_W4A16_CASES = [_W4A4_CASES[1], _W4A4_CASES[3]]
_GROUP = 32
_MODELS = [Model(name, CONFIGS[name]) for name, _, _ in _CASES]
_MODELS += [Model(name, BLOCK_CONFIGS[name], quantize=Fp8Blockwise()) for name, _, _ in _BLOCK_CASES]
_MODELS += [Model(name, BLOCK_CONFIGS[name], quantize=Int4(_GROUP)) for name, _, _ in _INT4_CASES]
_MODELS += [
    Model(name, BLOCK_CONFIGS[name], quantize=Nvfp4(), activations=activations)
    for activations, cases in ((True, _W4A4_CASES), (False, _W4A16_CASES))
    for name, _, _ in cases
]
_ALL = _CASES + _BLOCK_CASES + _INT4_CASES + _W4A4_CASES + _W4A16_CASES


def _label(case: tuple[str, GenLayout, int]) -> str:
    name, layout, rank = case
    return "-".join([name, *(f"{k}{n}" for k, n in asdict(layout).items() if n > 1), f"rank{rank}"])


def _case(model: Model, layout: GenLayout, rank: int) -> dict[str, Any]:
    at = layout.coordinates(rank)
    experts = (at.ep.rank, at.ep.size) if layout.ep > 1 else (at.tp.rank, at.tp.size)
    # Engines that share no experts don't know of one another.
    engines = (rank // (layout.tp * layout.pp), layout.dp) if layout.ep > layout.tp else (0, 1)
    return {
        "config": model.config,
        "architecture": ARCHITECTURES[model.config["model_type"]],
        "groups": {
            "tp": at.tp,
            "pp": (at.stage, layout.pp),
            "dp": engines,
            "ep": experts,
            "pcp": (0, 1),
            "dcp": (0, 1),
            "world": (rank, layout.world_size),
        },
        "expert_parallel": layout.ep > 1,
        "manifest": [[s.name, s.shape, dtype_name(s.dtype)] for s in model.specs()],
        "quantization": _quantization(model),
    }


def _quantization(model: Model) -> dict[str, Any] | None:
    """``quantization_config`` as published block-FP8 checkpoints have it, or as recipes set it for INT4 and NVFP4."""
    if model.quantize is None:
        return None
    if isinstance(model.quantize, Nvfp4):
        kept = [f"{module}.weight" for module in DEFAULT_EXCLUDED]
        return quantization_config((), kept, "", model.activations).quantization_config
    if isinstance(model.quantize, Int4):
        return int4(_GROUP)
    routers = (f"model.layers.{i}.mlp.gate" for i in range(model.config["num_hidden_layers"]))
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", *routers],
    }


def ask_vllm(folder: Path) -> list[dict[str, Any]]:
    cases = [_case(model, *case[1:]) for model, case in zip(_MODELS, _ALL, strict=True)]
    return ask("real_vllm", cases, {}, made_by=vllm_processes)


AHEAD = (ask_vllm,)  # vLLM loads meanwhile


@pytest.fixture(scope="module")
def real(found_ahead: FoundAhead) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = found_ahead.by(ask_vllm)
    return found


@pytest.mark.parametrize(
    "index",
    range(len(_ALL)),
    ids=[
        *map(_label, _CASES),
        *(f"fp8-{_label(case)}" for case in _BLOCK_CASES),
        *(f"int4-{_label(case)}" for case in _INT4_CASES),
        *(f"w4a4-{_label(case)}" for case in _W4A4_CASES),
        *(f"w4a16-{_label(case)}" for case in _W4A16_CASES),
    ],
)
def test_an_engine_rank_stores_what_the_catalogue_says(index: int, real: list[dict[str, Any]]) -> None:
    _, layout, rank = _ALL[index]
    stored = gen_storage(_MODELS[index], layout, rank)
    parameters = {param.name: [list(param.shape), str(param.dtype)] for param in stored}
    assert parameters == real[index]["parameters"]
    ours: dict[str, list[Any]] = {}
    for param in stored:
        for hf_name, landing in _landings(param):
            ours.setdefault(hf_name, []).append(landing)
    refused = {hf_name for param in stored for hf_name in param.refused}
    theirs = {
        hf_name: [[name, box, start, _strides(box, strides)] for name, box, start, strides in found]
        for hf_name, found in real[index]["landings"].items()
        if found and hf_name not in refused
    }
    assert {n: sorted(found) for n, found in ours.items()} == {n: sorted(f) for n, f in theirs.items()}
    assert set(real[index]["misc"]) <= refused, "the loader computes with a weight that is said to be placed"


def _landings(param: Param) -> list[tuple[str, list[Any]]]:
    storage = torch.empty(param.shape, device="meta")
    found = []
    for part in (*param.parts, *param.copies):
        view, box = storage[part.index], part.box
        if part.turned:
            view = view.mT
        if part.axes is not None:  # vLLM's side has no dimension split
            places = [part.axes.order.index(dim) for dim in range(len(box))]
            view, box = view.permute(places), tuple(box[place] for place in places)
        box = [list(side) for side in box]
        place = [param.name, box, view.storage_offset(), _strides(box, list(view.stride()))]
        found.append((part.name, place))
    return found


def _strides(box: list[list[int]], strides: list[int]) -> list[int]:
    """The stride of a dimension of one element says nothing."""
    return [n if stop - start > 1 else 0 for (start, stop), n in zip(box, strides, strict=True)]
