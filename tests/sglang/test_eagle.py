"""EAGLE heads that are trained beside the policy: refits give SGLang's model and head what it loads from the new checkpoints itself.

``make test-sglang`` runs them. Nothing is generated.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.families.checkpoints import write_pair
from tests.families.eagle import write_head
from tests.gpu.vllm_checkpoints import read_checkpoint
from tests.spawn import run_alone, run_ranks

from .eagle_ranks import Heads, HeadsResult, refit_heads

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute, twice, where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

# Vocabularies that SGLang pads on no rank.
SIZES = {"vocab_size": 128, "max_position_embeddings": 256}
EAGLE1: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle"]}
# Family of the model, algorithm, ranks, how many tokens the head has (None for all), whether its checkpoint has an embedding, and what is its
# configuration's own.
CASES: dict[str, tuple[str, str, int, int | None, bool, dict[str, Any]]] = {
    "llama TP1": ("llama", "EAGLE3", 1, 64, False, {}),
    "llama TP2": ("llama", "EAGLE3", 2, 64, False, {}),
    "qwen3 TP1": ("qwen3", "EAGLE3", 1, 64, True, {}),
    "qwen3 TP2": ("qwen3", "EAGLE3", 2, 64, True, {}),
    "all tokens TP1": ("llama", "EAGLE3", 1, None, False, {}),
    "tied TP1": ("llama", "EAGLE3", 1, 64, True, {"tie_word_embeddings": True}),
    "the model's head TP1": ("llama", "EAGLE3", 1, None, False, {"draft_vocab_size": None}),
    "EAGLE-1 TP1": ("llama", "EAGLE", 1, None, False, EAGLE1),
    "EAGLE-1 TP2": ("llama", "EAGLE", 2, None, True, EAGLE1),
}
Results = dict[str, list[HeadsResult]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    # Not in this process: an engine of another test may have brought SGLang's own configurations into transformers, which are others.
    written = run_alone(_write, tmp_path_factory.mktemp("heads"), environment={})
    found: Results = {}
    for ranks in (1, 2):
        own = {case: heads for case, heads in written.items() if CASES[case][2] == ranks}
        by_rank = run_ranks(refit_heads, ranks, ranks, list(own.values()), timeout_s=400)
        found |= dict(zip(own, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


def _write(folder: Path) -> dict[str, Heads]:
    found = {}
    for case, (family, algorithm, _, tokens, embedded, changes) in CASES.items():
        at = folder / case.replace(" ", "_")
        models = write_pair(family, at / family, SIZES)
        first, second = (
            write_head(
                at / f"head{index}",
                index,
                method=algorithm.lower(),
                tokens=tokens,
                embedding=-read_checkpoint(path)["model.embed_tokens.weight"] if embedded else None,
                sizes=SIZES,
                mapping=0,
                bias=algorithm == "EAGLE",
                changes=changes,
            )
            for index, path in enumerate(models)
        )
        found[case] = Heads(models, (first, second), algorithm)
    return found


def _unwanted(case: str) -> set[str]:
    """Weights of the head that a trainer need not send: SGLang has them of the model, or not at all."""
    _, _, _, tokens, embedded, changes = CASES[case]
    found = {"drafter.embed_tokens.weight"} if embedded else set()
    if "draft_vocab_size" in changes or "tie_word_embeddings" in changes:
        found.add("drafter.lm_head.weight")
    return found | ({"drafter.t2d"} if tokens else set())


@pytest.mark.parametrize("case", CASES)
def test_refits_give_model_and_head_what_sglang_loads_from_the_new_checkpoints(
    results: Results, case: str
) -> None:
    for rank in results[case]:
        assert rank.differing == {"there": [], "back": [], "all through the loader": [], "in buckets": []}
        # No weights; both heads have the same mapping.
        constants = ("cos_sin_cache", "hot_token_id")
        assert {name for name in rank.alike if not name.endswith(constants)} == set()
        assert ("drafter .hot_token_id" in rank.alike) == bool(rank.misc)


@pytest.mark.parametrize("case", CASES)
def test_heads_go_in_place_but_their_mapping_and_what_sglang_has_of_the_model(
    results: Results, case: str
) -> None:
    _, algorithm, _, tokens, _, changes = CASES[case]
    # Such a head is its embedding, which is the model's.
    tied = "tie_word_embeddings" in changes
    own_head = algorithm == "EAGLE3" and "drafter.lm_head.weight" not in _unwanted(case)
    for rank in results[case]:
        assert rank.misc.keys() == ({"drafter.d2t"} if tokens else set())
        assert rank.unused == _unwanted(case)
        assert {"drafter.fc.weight", "model.embed_tokens.weight"} <= rank.bulk
        assert ("drafter.lm_head.weight" in rank.bulk) == own_head
        assert ("lm_head.weight" in rank.shared) == (not own_head and not tied)
        assert "model.embed_tokens.weight" in rank.shared
        assert rank.left_out == bool(_unwanted(case) - {"drafter.t2d"})


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_without_a_weight_of_the_head_is_refused_and_one_without_any_leaves_it(
    results: Results, case: str
) -> None:
    for rank in results[case]:
        assert rank.taken == _unwanted(case)
        assert rank.refused["drafter.fc.weight"] == "drafter.model.fc.weight"
        assert [named for named in rank.refused.values() if not named.startswith("drafter.")] == []
        assert rank.refused.get("drafter.d2t", "") == ("drafter.d2t" if rank.misc else "")
        assert ("drafter.fc.bias" in rank.refused) == case.startswith("EAGLE-1")
        assert rank.stayed
        assert rank.told == 1


@pytest.mark.parametrize("case", CASES)
def test_a_mapping_of_other_tokens_than_sglang_drafts_with_is_refused_by_name(
    results: Results, case: str
) -> None:
    for rank in results[case]:
        assert rank.same_mapping
        assert rank.mapping == "drafter.d2t"


@pytest.mark.parametrize("case", CASES)
def test_a_head_of_fewer_tokens_is_refused_where_neither_side_has_a_mapping(
    results: Results, case: str
) -> None:
    fewer = CASES[case][3] is not None
    assert all(rank.unread == ("drafter.d2t" if fewer else "") for rank in results[case])


@pytest.mark.parametrize("case", CASES)
def test_an_engine_without_the_head_takes_the_model(results: Results, case: str) -> None:
    for rank in results[case]:
        assert rank.alone == {name for name in rank.bulk if not name.startswith("drafter.")}
