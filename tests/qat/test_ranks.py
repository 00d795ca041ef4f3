"""NVFP4 training under FSDP2 and Megatron (TP2, EP2), beside one process that trains the same model whole; and vLLM."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.nvfp4_checkpoint import fused_module, packed_names
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.ahead import FoundAhead
from tests.spawn import run_alone, run_ranks
from tests.vllm_processes import vllm_processes

from .models import read, trainer
from .ranks import STEPS, Case, cut, run, token_ids
from .vllm_side import ENVIRONMENT, serve

LAYOUTS: dict[str, tuple[str, dict[str, int] | None]] = {
    "fsdp": ("qwen3", None),
    "fsdp-moe": ("qwen3-moe", None),
    "tp2": ("qwen3", {"tensor_parallel": 2}),
    "ep2": ("qwen3-moe", {"tensor_parallel": 2, "expert_parallel": 2}),
}


@dataclass(frozen=True)
class Trained:
    """What each rank found in each layout, and what vLLM made of the checkpoints that they wrote.

    ``folder`` has the checkpoints ``qwen3`` and ``qwen3-moe``, and what each layout wrote, ``of-…``.
    """

    folder: Path
    reports: dict[str, list[dict[str, Any]]]
    vllm: dict[str, Any]


def train_in_all_layouts(folder: Path) -> Trained:
    for kind in ("qwen3", "qwen3-moe"):
        make_checkpoint(kind, folder / kind)
    cases = [Case(str(folder / kind), folder / f"of-{name}", how) for name, (kind, how) in LAYOUTS.items()]
    by_rank = run_ranks(run, 2, cases)
    reports = {name: [of_rank[i] for of_rank in by_rank] for i, name in enumerate(LAYOUTS)}
    written = [str(folder / f"of-{layout}") for layout in ("fsdp", "tp2", "fsdp-moe")]
    served = run_alone(serve, *written, environment=ENVIRONMENT, made_by=vllm_processes)
    return Trained(folder, reports, served)


AHEAD = (train_in_all_layouts,)


@pytest.fixture(scope="module")
def trained(found_ahead: FoundAhead) -> Trained:
    return found_ahead.by(train_in_all_layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_send_slices_of_the_packed_checkpoint_they_started_from(trained: Trained, layout: str) -> None:
    original = read(trained.folder / LAYOUTS[layout][0])
    reports = trained.reports[layout]
    largest: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name in reports[0]["weights"]:
        largest[fused_module(name)].append(original[name].abs().amax().float())
    kept = torch.bfloat16 if layout.startswith("fsdp") else torch.float32
    whole = {name: tensor.to(kept) for name, tensor in original.items()}
    for name in reports[0]["weights"]:
        names, shared = packed_names(name), nvfp4.global_scale(*largest[fused_module(name)])
        packed = nvfp4.quantize(original[name], shared)
        whole |= zip((names.weight, names.weight_scale, names.weight_scale_2), packed, strict=True)
    for report in reports:
        held = [part for part in report["first"]["held"] if not part[0].endswith("input_scale")]
        assert len({name for name, _, _ in held}) >= len(report["weights"])
        assert list(cut(whole, held)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_learns_and_ranks_then_send_slices_of_the_checkpoint_they_write(
    trained: Trained, layout: str
) -> None:
    written = read(trained.folder / f"of-{layout}")
    held = [part for report in trained.reports[layout] for part in report["slices"]["held"]]
    routers = {name for name in written if name.endswith("mlp.gate.weight")}
    assert {name for name, _, _ in held} | routers == written.keys()
    assert list(cut(written, held)) == []
    for report in trained.reports[layout]:
        first, second = report["losses"]
        assert second < first - (0.1 if "fsdp" in layout else 0.01)
    for before, after in zip(
        trained.reports[layout][0]["first"]["held"], trained.reports[layout][0]["slices"]["held"], strict=True
    ):
        if before[0].endswith("proj.weight"):
            assert not torch.equal(before[2], after[2]), f"{before[0]} did not change"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_have_the_scales_of_one_process(trained: Trained, layout: str) -> None:
    _, qat = trainer(trained.folder / LAYOUTS[layout][0])
    wanted = qat.state_dict()
    for report in trained.reports[layout]:
        assert report["weights"] == qat.weights
        assert report["scales"] == {n: qat.scale(n, torch.float32).item() for n in qat.weights}
        # Of BF16 or of another order of sums: nearly equal, but on all ranks the same.
        assert report["inputs"] == pytest.approx(wanted, rel=0.03 if "fsdp" in layout else 1e-4)
        assert report["inputs"] == trained.reports[layout][0]["inputs"]


@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_megatron_computes_what_transformers_does(trained: Trained, layout: str) -> None:
    model, _ = trainer(trained.folder / LAYOUTS[layout][0])
    plain, _ = trainer(trained.folder / LAYOUTS[layout][0], activations=False)
    with torch.no_grad():
        wanted, weights_only = model(token_ids()).logits, plain(token_ids()).logits
    far = (weights_only - wanted).abs().mean()
    for report in trained.reports[layout]:
        # A rounding apart before it is quantized, an element may be a whole step apart behind it.
        assert (report["logits"] - wanted).abs().mean() < 0.1 * far
        assert report["without_gradient"] == []
        assert "gradient_accumulation_fusion" in report["refusal"]
        assert "written after the last refresh()" in report["stale"]
        # Before and after each step's end, by both ways.
        assert [bool(kept) for kept in report["kept"]] == [True, False] * STEPS


def test_what_fails_on_one_rank_fails_on_all_and_training_goes_on(trained: Trained) -> None:
    for report in trained.reports["fsdp"]:
        assert "SafetensorError" in report["full disk"]
        assert "trainer rank 1 of 2: OSError" in report["prepare"]
        assert "different scales for the inputs of model.layers.0" in report["other scales"]
        assert report["left behind"] == []
        # A state that is written into shards behind torch's counters is noticed.
        for how in ("averaged", "loaded"):
            assert "written after the last refresh()" in report[how], how


@pytest.mark.parametrize("how", ["read", "encoded"])
def test_a_rank_that_was_written_without_a_word_finds_its_scales_anew_and_the_others_trust_theirs(
    trained: Trained, how: str
) -> None:
    (first, second), (written, anew) = (report["looks"][how] for report in trained.reports["fsdp"])
    assert [found for found, _ in (first, second)] == [True, True]
    assert [found for found, _ in (written, anew)] == [False, None]
    assert first[1] == written[1] < second[1] == anew[1]


def test_vllm_loads_the_checkpoint_and_takes_refits_of_it_and_computes_what_training_does(
    trained: Trained,
) -> None:
    found = trained.vllm
    assert found["changed"]
    # Of what is packed nothing takes the misc path. Two weights do that the CPU's kernels have a copy of.
    assert set(found["misc"]) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    # CUDA graphs hold the addresses of what kernels keep beside parameters.
    assert found["workspaces"] == [8, True]
    assert "input_scale" in found["without input scales"]
    assert "checkpoint that the trainer's own quantization made" in found["a layer left out"]
    assert found["methods"] == {"ModelOptNvFp4LinearMethod"}
    # vLLM's emulation divides by the reciprocal of a scale where its kernels, and training, multiply by the scale.
    assert max(found["apart"].values()) < 2**-7
    assert len(found["expert_parameters"]) == 8
    assert found["wrong_experts"] == []
    for fused, parts in found["fused"]:
        assert len({fused_module(f"x.{part}.weight") for part in parts}) == 1, fused
