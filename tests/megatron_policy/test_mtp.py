"""MTP layers in a Megatron trainer: what is built, exported and sent of them, and that the policy is trained as without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_ranks import STEPS, two_ranks
from safetensors.torch import load_file, save_file

from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.families.checkpoints import add_qwens_prediction_layer, write_checkpoint
from tests.families.expected import MISC, is_of
from tests.spawn import PATIENT_S, run_ranks

pytestmark = pytest.mark.timeout(600)

# A vocabulary that Megatron doesn't pad.
CHANGES = {"vocab_size": 64}
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h-latent", "qwen3_next")
COPIES = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2 and EP2": {"expert_parallel": 2},
}
# Left to make test-all: every family is built at TP2, and the policy's own tests train at it.
_MORE = {"TP2"}
_LAYOUTS = left_to_all(LAYOUTS, _MORE)


def _without(path: str, folder: Path, part: str) -> str:
    """A copy of a checkpoint that lacks weights."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if part not in name}
    save_file(kept, file, {"format": "pt"})
    return str(folder)


def run_all_cases(root: Path) -> list[dict[str, Any]]:
    paths = {name: write_checkpoint(name, root / name, short=True, changes=CHANGES) for name in FAMILIES}
    add_qwens_prediction_layer(paths["qwen3_next"])
    layerless = shutil.copytree(paths["glm4_moe"], root / "layerless")
    config = layerless / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    lacking = [_without(paths["glm4_moe"], root / "lacking", "eh_proj"), str(layerless)]
    layouts = {name: layout for name, layout in LAYOUTS.items() if name not in _MORE}
    return run_ranks(two_ranks, 2, paths, lacking, paths["glm4_moe"], layouts, timeout_s=550)


@of_all_tests
def train_in_more_layouts(root: Path) -> list[dict[str, Any]]:
    path = write_checkpoint("glm4_moe", root / "glm4_moe", short=True, changes=CHANGES)
    layouts = {name: LAYOUTS[name] for name in _MORE}
    return run_ranks(two_ranks, 2, {}, [], path, layouts, timeout_s=PATIENT_S)


AHEAD = (run_all_cases, train_in_more_layouts)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    full = request.node.get_closest_marker("full") is not None
    found: list[dict[str, Any]] = request.getfixturevalue("more" if full else "usual")
    return found


@pytest.fixture(scope="module")
def usual(found_ahead: FoundAhead) -> list[dict[str, Any]]:
    return found_ahead.by(run_all_cases)


@pytest.fixture(scope="module")
def more(found_ahead: FoundAhead) -> list[dict[str, Any]]:
    return found_ahead.by(train_in_more_layouts)


def _predicts(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.2."))


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_layers_of_a_family_are_sent_as_bridge_exports_them_and_the_checkpoint_has_them(ranks, family):
    for rank in ranks:
        built = rank[family]
        assert built.sent == built.exported
        assert len([name for name in built.exported if _predicts(name)]) > 10
        assert built.unequal == []
        assert all(is_of(name, MISC[family]) for name in built.misc)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_without_mtp_layers_has_none_of_them_whatever_the_checkpoint_has(ranks, family):
    for rank in ranks:
        built = rank[family]
        assert built.left == []
        # What the model has itself, Bridge exports of GLM-4.7-Flash as copies in the layer's name.
        copies = {name for name in built.exported_without if _predicts(name)}
        assert copies <= COPIES
        assert built.exported_without == {n for n in built.exported if not _predicts(n)} | copies


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_the_policy_is_trained_bit_for_bit_as_without_mtp_layers_which_learn_beside_it(ranks, layout):
    for rank in ranks:
        found = rank[layout]
        assert found.equal_logprobs
        assert found.alone.keys() == {name for name in found.after if not _predicts(name)}
        assert all(torch.equal(found.after[name], weight) for name, weight in found.alone.items())
        for trained, alone in found.metrics:
            assert trained.pop("grad_norm") == pytest.approx(alone.pop("grad_norm"), rel=1e-5)
            assert trained.keys() - alone.keys() == {"mtp_accuracy"}
            assert {name: trained[name] for name in alone} == alone
        learned = [name for name in found.after if _predicts(name) and not name.endswith("bias")]
        frozen = [name for name in learned if torch.equal(found.before[name], found.after[name])]
        assert len(learned) > 10
        assert frozen == []


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_mtp_layers_learn_the_tokens_that_the_mask_selects_and_the_metrics_tell_how_well(ranks, layout):
    for rank in ranks:
        assert rank[layout].blind
        shares = [trained["mtp_accuracy"] for trained, _ in rank[layout].metrics]
        assert len(shares) == STEPS
        assert 0 <= shares[0] <= shares[-1] <= 1
        assert shares[-1] > 0


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_step_in_which_mtp_layers_have_no_finite_gradient_is_left_out(ranks, layout):
    assert all(rank[layout].skipped == 1 and rank[layout].unchanged for rank in ranks)


def test_a_checkpoint_without_mtp_layers_is_refused_where_they_are_to_be_trained(ranks):
    for rank in ranks:
        lacking, layerless = rank["refused"]
        assert lacking.startswith("CheckpointMismatch")
        assert "eh_proj" in lacking
        assert layerless.startswith("ValueError")
        assert "num_nextn_predict_layers" in layerless
