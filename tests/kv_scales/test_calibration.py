"""Calibrated scales of trainers in parallel layouts against a plain model whose keys are computed step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rlrefit.integration.errors import RefitError
from rlrefit.workers.kv_scales.calibration import AmaxRecorder, watch_transformers
from rlrefit.workers.trainers.fsdp.attention import attention_modules
from tests.fsdp.models import smallest
from tests.spawn import run_ranks

from .calibration_ranks import (
    ATTENTIONS,
    LAYERS,
    LAYOUTS,
    MARGIN,
    calibrated,
    token_ids,
    write_checkpoint,
)

CPU = torch.device("cpu")


def expected(path: Path, step: int, factor: float) -> dict[str, float]:
    """Scales by hooks on norms and projections of a whole model, rotated here."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str):
        return lambda module, args, output: seen.update({name: output})

    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for kind, module in (("q", attention.q_norm), ("k", attention.k_norm), ("v", attention.v_proj)):
            module.register_forward_hook(keep(f"{i}{kind}"))
    ids = token_ids(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
        model(ids)
        cos, sin = model.model.rotary_emb(seen["0q"], torch.arange(ids.shape[1])[None])
        found = {}
        for i in range(LAYERS):
            # [rows, tokens, heads, 16], heads before tokens for the rotation
            q, k = apply_rotary_pos_emb(
                seen[f"{i}q"].transpose(1, 2), seen[f"{i}k"].transpose(1, 2), cos, sin
            )
            for kind, tensor in (("k", k), ("v", seen[f"{i}v"]), ("q", q)):
                amax = tensor.abs().max().item()
                found[f"model.layers.{i}.self_attn.{kind}_scale"] = amax * MARGIN / 448
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("calibration") / "model")


@pytest.fixture(scope="module")
def by_ranks(path: Path) -> list[dict[str, list[dict[str, float]]]]:
    return run_ranks(calibrated, 2, str(path))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[dict[str, float]]:
    return [expected(path, step, factor) for step, factor in ((1, 1.0), (2, 1.5))]


@pytest.mark.parametrize("trainer", [*LAYOUTS, *ATTENTIONS])
def test_a_calibration_finds_the_largest_key_value_and_query_of_each_layer(
    by_ranks: list[dict[str, list[dict[str, float]]]], wanted: list[dict[str, float]], trainer: str
) -> None:
    ours, theirs = (result[trainer] for result in by_ranks)
    assert ours == theirs
    for found, oracle in zip(ours, wanted, strict=True):
        assert list(found) == list(oracle)
        assert found == pytest.approx(oracle, rel=1e-5)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_attention_in_modules_that_torch_has_put_others_around_is_found(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = smallest()
    attention = {f"model.layers.{i}.self_attn": layer.self_attn for i, layer in enumerate(model.model.layers)}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn = wrap(layer.self_attn)
        model.model.layers[i] = wrap(layer)
    assert attention_modules(model) == attention


def test_layers_that_did_not_run_get_no_scales_and_zeros_any() -> None:
    recorder = AmaxRecorder(["a", "b", "c"], CPU)
    recorder.record("b", torch.zeros(2, 3), -torch.full((2, 3), 448.0), torch.full((2, 3), 2.0).bfloat16())
    recorder.record("b", torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 896.0))
    recorder.record("c", *(torch.empty(0, 3) for _ in range(3)))
    assert recorder.scales(1.0) == {"b.k_scale": 1.0, "b.v_scale": 2.0, "b.q_scale": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_activations_that_are_not_finite_are_an_error_that_names_their_layers(value: float) -> None:
    recorder = AmaxRecorder(["a", "b", "c"], CPU)
    one = torch.ones(2, 2)
    for layer, broken in (("a", one), ("b", one * value), ("c", one.index_fill(0, torch.tensor(1), value))):
        recorder.record(layer, one, one, broken)
        recorder.record(layer, one, one, one)
    with pytest.raises(RefitError, match="queries of b, c were infinite or not a number"):
        recorder.scales(1.0)


@pytest.mark.parametrize("margin", [0.99, 0.0, float("nan")])
def test_a_margin_that_clips_the_calibration_is_an_error(margin: float) -> None:
    with pytest.raises(RefitError, match=r"margin: .* give at least 1"):
        AmaxRecorder(["a"], CPU).scales(margin)


def test_attention_that_can_not_be_watched_is_an_error() -> None:
    with (
        pytest.raises(RefitError, match="Linear does not compute its attention"),
        watch_transformers({"model.layers.0.self_attn": nn.Linear(2, 2)}, lambda *_: None),
    ):
        pass
