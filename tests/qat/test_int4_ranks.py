"""INT4 training under FSDP2 and Megatron (TP2, EP2), beside one process, and beside models of the engine's weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlrefit.integration.quantize import int4
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.checkpoint_folder import weight_names
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from tests.ahead import FoundAhead
from tests.families.checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .int4_ranks import GROUP, Case, config, run, sgd_step
from .models import read
from .ranks import cut, token_ids

_LATENT = "deepseek_v3"
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("qwen3", {}),
    "fsdp-sharded-before": ("qwen3", {"quantized": "after"}),
    "fsdp-moe": ("qwen3-moe", {}),
    "tp2": ("qwen3", {"megatron": {"tensor_parallel": 2}}),
    "ep2": ("qwen3-moe", {"megatron": {"tensor_parallel": 2, "expert_parallel": 2}}),
    "latent-attention": (
        _LATENT,
        {"megatron": {"tensor_parallel": 2, "expert_parallel": 2}, "latent": True},
    ),
}
# Of which no rank cuts a group, nor of the shared experts.
_WIDE = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    "n_group": 1,
}


@dataclass(frozen=True)
class Trained:
    """What each rank found in each layout; ``folder`` has the checkpoints ``qwen3``, ``qwen3-moe`` and ``deepseek_v3``."""

    folder: Path
    reports: dict[str, list[dict[str, Any]]]


def train_in_int4(folder: Path) -> Trained:
    for kind in ("qwen3", "qwen3-moe"):
        _dequantized(make_checkpoint(kind, folder / kind), folder / f"{kind}-dequantized")
    latent = write_checkpoint(_LATENT, folder / _LATENT, changes=_WIDE)
    _dequantized(Path(latent), folder / f"{_LATENT}-dequantized")
    cases = [Case(folder / kind, folder / f"{kind}-dequantized", **how) for kind, how in LAYOUTS.values()]
    by_rank = run_ranks(run, 2, cases)
    reports = {name: [of_rank[i] for of_rank in by_rank] for i, name in enumerate(LAYOUTS)}
    return Trained(folder, reports)


def _dequantized(checkpoint: Path, folder: Path) -> None:
    shutil.copytree(checkpoint, folder)
    weights = {
        name: int4.dequantize(*int4.quantize(t, GROUP)) if _is_quantized(name, t) else t
        for name, t in read(checkpoint).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _is_quantized(name: str, weight: torch.Tensor) -> bool:
    return "layers" in name and weight.dim() == 2 and not name.endswith("mlp.gate.weight")


AHEAD = (train_in_int4,)


@pytest.fixture(scope="module")
def trained(found_ahead: FoundAhead) -> Trained:
    return found_ahead.by(train_in_int4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_send_slices_of_the_codes_of_whole_weights_before_and_after_a_step(
    trained: Trained, layout: str
) -> None:
    original = read(trained.folder / LAYOUTS[layout][0])
    reports = trained.reports[layout]
    assert all(report["told"] for report in reports)
    # The checkpoint with latent attention has a layer that predicts, too, which is not trained.
    names = weight_names(trained.folder / LAYOUTS[layout][0])
    assert reports[0]["weights"] == {name for name in names if _is_quantized(name, original[name])}
    for when, weights in (("first", original), ("second", reports[0]["trained"])):
        whole: dict[str, torch.Tensor] = {}
        for name in reports[0]["weights"]:
            codes, scales = int4.quantize(weights[name], GROUP)
            whole |= {f"{name}_packed": codes, f"{name}_scale": scales}
        held = [
            part
            for report in reports
            for part in report[when]["held"]
            if part[0].endswith(("_packed", "_scale"))
        ]
        assert {name for name, _, _ in held} == {
            name + end for name in reports[0]["weights"] for end in ("_packed", "_scale")
        }
        assert list(cut(whole, held)) == []
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(original[name], reports[0]["trained"][name])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "fsdp" in name])
def test_two_ranks_under_fsdp_train_as_one_process_does_bit_for_bit(trained: Trained, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = trained.folder / LAYOUTS[layout][0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantize_module(model, config())
    for step in range(2):
        with torch.no_grad():
            logits = model(token_ids()).logits
        for report in trained.reports[layout]:
            assert torch.equal(report["logits"][step], logits)
        sgd_step(model)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "fsdp" not in name])
def test_a_megatron_rank_computes_with_its_part_of_the_engines_weights_and_its_weights_get_the_gradients(
    trained: Trained, layout: str
) -> None:
    for report in trained.reports[layout]:
        assert report["logits equal"]
        assert report["other gradients"] == []
        assert report["without gradient"] == []
        assert report["changed"]
