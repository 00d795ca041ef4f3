"""EAGLE drafters that are trained beside the policy: refits bring them with it, by the loaders of their own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_checkpoints import read_checkpoint
from vllm_drafter_ranks import Drafted, DraftedRank, draft_there_and_back
from vllm_ranks import Case, Layout

from tests.ahead import FoundAhead
from tests.families.checkpoints import write_pair
from tests.families.eagle import write_head
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_processes import vllm_processes

# All of a model is poisoned, so that neither vocabulary may have padding.
SIZES = {"vocab_size": 128, "max_position_embeddings": 256}
# Family of the model, method, ranks, how many tokens the head has (None for all), and whose embedding it computes with.
CASES = {
    "llama TP1": ("llama", "eagle3", 1, 64, "shared"),
    "llama TP2": ("llama", "eagle3", 2, 64, "shared"),
    "qwen3 TP2": ("qwen3", "eagle3", 2, 64, "own"),
    "the same embedding TP1": ("llama", "eagle3", 1, 64, "equal"),
    "all tokens TP1": ("llama", "eagle3", 1, None, "shared"),
    "EAGLE-1 TP1": ("llama", "eagle", 1, None, "shared"),
    "EAGLE-1 TP2": ("llama", "eagle", 2, None, "equal"),
}


def refit_heads(folder: Path) -> dict[str, list[DraftedRank]]:
    """Every number of ranks is one group of processes."""
    found: dict[str, list[DraftedRank]] = {}
    for ranks in (1, 2):
        own: dict[str, Drafted] = {}
        for case, (family, method, size, tokens, embedding) in CASES.items():
            if size != ranks:
                continue
            at = folder / case.replace(" ", "_")
            pair = write_pair(family, at / family, SIZES)
            of_model = [read_checkpoint(path)["model.embed_tokens.weight"] for path in pair]
            held = {"shared": (None, None), "equal": of_model, "own": [-one for one in of_model]}[embedding]
            heads = [
                write_head(at / f"head{i}", i, method=method, tokens=tokens, embedding=held[i], sizes=SIZES)
                for i in (0, 1)
            ]
            engine = Case(*pair, Layout(tensor=size), family=True)
            own[case] = Drafted(engine, heads=(heads[0], heads[1]), method=method)
        by_rank = run_ranks(
            draft_there_and_back, ranks, list(own.values()), timeout_s=PATIENT_S, made_by=vllm_processes
        )
        found |= dict(zip(own, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


AHEAD = (refit_heads,)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[str, list[DraftedRank]]:
    return found_ahead.by(refit_heads)


@pytest.fixture
def ranks(case: str, results: dict[str, list[DraftedRank]]) -> list[DraftedRank]:
    """What each rank of a case saw."""
    return results[case]


@pytest.mark.parametrize("case", CASES)
def test_refits_give_model_and_head_what_vllm_loads_from_the_new_checkpoints(ranks, case):
    for rank in ranks:
        assert rank.differing == {"there": [], "back": [], "all through the loader": []}
        assert rank.process_state_untouched


@pytest.mark.parametrize("case", CASES)
def test_heads_go_in_place_and_what_the_model_holds_too_comes_once(ranks, case):
    *_, embedding = CASES[case]
    for rank in ranks:
        assert rank.misc == {}
        drafted = {name.removeprefix("drafter.") for name in rank.bulk if name.startswith("drafter.")}
        assert "fc.weight" in drafted
        assert ("embed_tokens.weight" in drafted) == (embedding == "own")
        aside = {"drafter.t2d", "drafter.embed_tokens.weight"}
        assert {name for name in rank.aside if name.startswith("drafter.")} <= aside
        assert any("embed_tokens" in name for name in rank.shared) == (embedding != "own")


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_without_a_weight_of_the_head_is_refused_and_one_without_any_leaves_it(ranks, case):
    for rank in ranks:
        # The model's embedding stands in the place of a copy of it.
        assert rank.taken <= {"drafter.t2d", "drafter.embed_tokens.weight"}
        assert rank.refused > {"drafter.fc.weight"}
        assert rank.stayed
        assert len(rank.told) == 1


@pytest.mark.parametrize("case", CASES)
def test_heads_that_compute_with_a_copy_of_their_weights_are_refused(ranks, case):
    for rank in ranks:
        assert "(copied)" in rank.copying


@pytest.mark.parametrize("case", CASES)
def test_an_engine_without_the_head_takes_the_model_and_tells_once_what_it_leaves(ranks, case):
    for rank in ranks:
        wanted, warnings = rank.left
        assert wanted == {name for name in rank.bulk if not name.startswith("drafter.")}
        assert warnings == 1


@pytest.mark.parametrize("case", CASES)
def test_a_head_in_whose_place_vllm_put_the_models_for_want_of_a_checkpoint_is_refused(ranks, case):
    _, method, _, _, embedding = CASES[case]
    # The first weight of its own that the trainer sends.
    own = "embed_tokens" if embedding != "shared" else "lm_head" if method == "eagle3" else ""
    for rank in ranks:
        assert rank.random == (f"drafter.{own}.weight" if own else "taken")
