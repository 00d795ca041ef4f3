"""Engines that decode speculatively: which drafters follow a refit, which stay as they are, and which are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_layouts import FAMILIES, UNPADDED
from torch import nn
from vllm_drafter_ranks import DRAFTERS, MTP, Drafted, DraftedRank, draft_there_and_back
from vllm_ranks import Case, Layout

from rlrefit.integration.errors import PlanError, RefitError
from rlrefit.workers.engines.common.loader_trace.trace import trace_loader
from rlrefit.workers.engines.vllm.drafters import check_drafter, check_follows, live_drafter
from tests.ahead import FoundAhead, of_all_tests
from tests.families.checkpoints import add_qwens_prediction_layer, write_pair
from tests.families.expected import VLLM, is_of
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_cpu import PACKS_EXPERTS
from tests.vllm_processes import vllm_processes

POLICY, OTHER = "/models/policy", "/models/eagle"
_EAGLE = {"method": "eagle3", "model": OTHER}
_LOADED = SimpleNamespace(load_format="auto")
_SHARED = ("embed_tokens", "lm_head", "shared_head.head")


def _config(load_format: str = "auto", **speculative: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=POLICY, get_total_num_hidden_layers=lambda: 2),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=SimpleNamespace(**speculative) if speculative else None,
    )


@pytest.mark.parametrize(
    "drafter",
    [
        {},
        *(
            {"method": name, "model": name, "draft_load_config": None}
            for name in ("ngram", "ngram_gpu", "suffix")
        ),
        {"method": "mtp", "model": POLICY, "draft_load_config": None},
    ],
    ids=lambda drafter: drafter.get("method", "none"),
)
def test_no_drafter_one_without_weights_and_mtp_layers_of_the_policy_are_taken_in_silence(drafter, caplog):
    check_drafter(_config(**drafter))
    assert not caplog.records


def test_a_drafter_that_is_the_served_checkpoint_itself_is_refused_before_anything_is_written():
    with pytest.raises(RefitError, match="draft_model"):
        check_drafter(_config(method="draft_model", model=POLICY, draft_load_config=None))


class _Policy(nn.Module):
    """One layer; its loader leaves all else aside, as vLLM's loaders do with MTP layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 3, bias=False)])})
        self.mtp = nn.Linear(2, 3, bias=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in (OWN, TAKEN):
                self.get_parameter(name).data.copy_(tensor)


OWN = "model.layers.0.weight"
# Named as an MTP layer, but of the model that is served: its loader takes it.
TAKEN = "mtp.weight"
# Another rank's and another part's: what this rank leaves aside is no MTP layer for that alone.
BESIDE = ("model.layers.1.weight", "vision_tower.encoder.layers.9.weight", "lm_head.weight")
# Of a trainer that has no MTP layers: the embedding and the head once more.
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
MTP_NAMES = [
    "model.layers.2.eh_proj.weight",
    "language_model.model.layers.2.mlp.up_proj.weight",
    "mtp.fc.weight",
    "model.mtp.layers.0.eh_proj.weight",
    "model.mtp_layers.0.input_proj.weight",
    "model.mtp_block.0.mlp.up_proj.weight",
]


def _follows(method: str, model: str, *names: str) -> None:
    policy = _Policy()
    trace = trace_loader(
        policy.load_weights,
        dict(policy.named_parameters()),
        [(name, (3, 2), torch.float32) for name in (OWN, TAKEN, *BESIDE, *names)],
    )
    check_follows(_config(method=method, model=model), trace)


@pytest.mark.parametrize("name", MTP_NAMES)
def test_mtp_layers_of_another_checkpoint_are_refused_where_the_policy_trains_its_own(name):
    with pytest.raises(PlanError) as caught:
        _follows("mtp", OTHER, name)
    assert caught.value.parameter == name
    _follows("mtp", OTHER, *COPIES)
    _follows("mtp", POLICY, name)
    _follows("ngram", OTHER, name)


@pytest.mark.parametrize(
    ("load_format", "loaded", "random"),
    [("auto", None, False), ("dummy", None, True), ("dummy", _LOADED, False)],
)
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_a_drafter_of_another_checkpoint_is_told_once_and_whether_it_holds_random_numbers(
    method, load_format, loaded, random, caplog
):
    check_drafter(_config(load_format, method=method, model=OTHER, draft_load_config=loaded))
    _follows(method, OTHER)
    [record] = caplog.records
    assert f"({method}) with {OTHER}" in record.getMessage()
    assert ("random numbers" in record.getMessage()) == random


def test_the_drafter_is_found_in_either_model_runner_and_by_the_method_of_later_ones():
    drafter = nn.Linear(2, 3)
    assert live_drafter(SimpleNamespace(drafter=SimpleNamespace(model=drafter))) is drafter
    assert live_drafter(SimpleNamespace(speculator=SimpleNamespace(model=drafter))) is drafter
    assert live_drafter(SimpleNamespace(get_draft_model=lambda: drafter)) is drafter
    # Another stage of a pipeline, drafts without a model, and no speculation.
    for runner in (
        {"speculator": None},
        {"drafter": SimpleNamespace()},
        {"get_draft_model": lambda: None},
        {},
    ):
        assert live_drafter(SimpleNamespace(**runner)) is None


# A drafter that shares nothing with its model loads both copies of an embedding of GLM-4.7-Flash, and the last one wins.
CASES = {
    **{f"{family} TP2": (family, 2, False) for family in DRAFTERS if not family.startswith("glm4")},
    **{f"{family} apart": (family, 1, True) for family in ("qwen3_next", "glm4_moe_lite")},
}
# What one rank takes whole two take in part, by the same code of the family's; a drafter of GLM's is DeepSeek's but for its names and
# copies, of which one more keeps each.
MORE = {
    **{f"{family} TP1": (family, 1, False) for family in DRAFTERS},
    **{f"{family} TP2": (family, 2, False) for family in ("glm4_moe", "glm4_moe_lite")},
    "glm4_moe apart": ("glm4_moe", 1, True),
}
_ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)]


def refit_drafters(folder: Path) -> dict[str, list[DraftedRank]]:
    return refit_each(CASES, folder)


def refit_each(cases: dict[str, tuple[str, int, bool]], folder: Path) -> dict[str, list[DraftedRank]]:
    """Every number of ranks is one group of processes."""
    pairs = {}
    for family in DRAFTERS:
        pairs[family] = write_pair(
            family, folder / family, UNPADDED | FAMILIES[family], router_dtype=torch.float32
        )
        if family == "qwen3_next":
            for path in pairs[family]:
                add_qwens_prediction_layer(path)
    found: dict[str, list[DraftedRank]] = {}
    for ranks in (1, 2):
        own = {
            name: Drafted(Case(*pairs[family], Layout(tensor=size), family=True, more=MTP), apart)
            for name, (family, size, apart) in cases.items()
            if size == ranks
        }
        if not own:
            continue
        by_rank = run_ranks(
            draft_there_and_back, ranks, list(own.values()), timeout_s=PATIENT_S, made_by=vllm_processes
        )
        found |= dict(zip(own, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


@of_all_tests
def refit_more_drafters(folder: Path) -> dict[str, list[DraftedRank]]:
    return refit_each(MORE, folder)


AHEAD = (refit_drafters, refit_more_drafters)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[str, list[DraftedRank]]:
    return found_ahead.by(refit_drafters)


@pytest.fixture(scope="module")
def more(found_ahead: FoundAhead) -> dict[str, list[DraftedRank]]:
    return found_ahead.by(refit_more_drafters)


@pytest.fixture
def ranks(case: str, request: pytest.FixtureRequest) -> list[DraftedRank]:
    """What each rank of a case saw."""
    found: dict[str, list[DraftedRank]] = request.getfixturevalue("more" if case in MORE else "results")
    return found[case]


@pytest.mark.parametrize("case", _ALL)
def test_refits_give_target_and_drafter_what_vllm_loads_from_the_new_checkpoint(ranks, case):
    for rank in ranks:
        assert rank.differing == {"there": [], "back": [], "all through the loader": []}
        assert rank.process_state_untouched


@pytest.mark.parametrize("case", _ALL)
def test_mtp_layers_go_in_place_and_what_both_models_hold_comes_once(ranks, case):
    family, _, apart = (CASES | MORE)[case]
    parts = (*VLLM.misc.get(family, ()), *((("mlp.gate.", ""), ("experts.", "")) if PACKS_EXPERTS else ()))
    for rank in ranks:
        drafted = [name for name in rank.bulk if name in rank.refused]
        assert len(drafted) > 10
        assert [name for name in rank.misc if name in rank.refused and not is_of(name, parts)] == []
        assert {any(part in name for part in _SHARED) for name in rank.shared} == (set() if apart else {True})
        # One place for each copy that the two models would have, the other is filled from it.
        both = [name for name in rank.bulk if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
        assert {rank.bulk[name] for name in both} <= {1}


@pytest.mark.parametrize("case", _ALL)
def test_a_manifest_without_a_weight_of_the_mtp_layers_is_refused_and_one_without_any_leaves_them(
    ranks, case
):
    for rank in ranks:
        assert len(rank.refused) > 10
        # The served model's stand in the place of copies of these.
        assert all(any(part in name for part in _SHARED) for name in rank.taken)
        assert rank.stayed
        assert len(rank.told) == 1


@pytest.mark.parametrize("case", _ALL)
def test_mtp_layers_that_compute_with_a_copy_of_their_weights_are_refused(ranks, case):
    for rank in ranks:
        assert "(copied)" in rank.copying
