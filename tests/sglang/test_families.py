"""Every family in SGLang's models: what a refit leaves in them is what SGLang itself loads. Nothing is generated.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.families.checkpoints import config_of, has_prediction
from tests.families.expected import MISC, SGLANG, is_of, is_prediction
from tests.spawn import run_alone, run_ranks

from .family_checkpoints import write_as_published
from .family_ranks import FamilyResult, refit_families

pytestmark = [
    pytest.mark.timeout(1800),  # SGLang loads for a minute, twice, where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

# Mixtral stands in no table: no trainer of these tests has it.
FAMILIES = (*SGLANG.misc, "mixtral")
SIZES = (1, 2)
CASES = [(family, size) for family in FAMILIES for size in SIZES]


# By family and number of ranks.
Results = dict[tuple[str, int], list[FamilyResult]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _refit(tmp_path_factory.mktemp("families"), FAMILIES)


def _write_pairs(folder: Path, families: Sequence[str]) -> list[tuple[str, str]]:
    return [write_as_published(family, folder / family) for family in families]


def _refit(folder: Path, families: Sequence[str]) -> Results:
    # Not in this process: an engine of another test may have brought SGLang's own configurations into transformers, which are others.
    pairs = run_alone(_write_pairs, folder, families, environment={})
    attention = [
        "triton" if family.startswith(("gpt_oss", "gemma4")) else "torch_native" for family in families
    ]
    found = {}
    for size in SIZES:
        by_rank = run_ranks(refit_families, size, size, pairs, attention, timeout_s=850)
        found |= {(family, size): [rank[i] for rank in by_rank] for i, family in enumerate(families)}
    return found


@pytest.mark.parametrize(("family", "size"), CASES)
def test_a_poisoned_model_is_after_a_refit_what_sglang_loads(
    results: Results, family: str, size: int
) -> None:
    for rank in results[family, size]:
        assert rank.refused == ""
        assert len(rank.differing) == 4
        assert [names for names in rank.differing.values() if names] == []
        assert rank.alike == rank.moved == []


@pytest.mark.parametrize(("family", "size"), CASES)
def test_all_of_a_family_that_sglang_holds_as_it_is_loaded_goes_in_place(
    results: Results, family: str, size: int
) -> None:
    own = SGLANG.misc.get(family, ())
    layers = config_of(family, short=True)["num_hidden_layers"]
    for rank in results[family, size]:
        assert len(rank.bulk) > 10
        assert [part for part, _ in own if not any(part in name for name in rank.misc)] == []
        assert [name for name in rank.misc if not is_of(name, (*own, *MISC.get(family, ())))] == []
    # A rank holds zeros in place of a bias that all ranks add up.
    unused = set.intersection(*(set(rank.unused) for rank in results[family, size]))
    assert [name for name in unused if not is_prediction(name, layers)] == []
    assert bool(unused) == has_prediction(family)


@pytest.mark.parametrize(("family", "size"), CASES)
def test_what_can_not_be_written_in_place_is_refused_by_name(
    results: Results, family: str, size: int
) -> None:
    for rank in results[family, size]:
        for occasion, said in (
            ("_derived_weight_cache_error", "as SGLang says"),
            ("w_kc_qrep", "dcp_replicate_q_proj=False"),
            ("_qk_gamma_bf16", "Inkling"),
        ):
            for refusal in (rank.refusals[occasion], rank.refusals[f"{occasion}, later"]):
                assert "layers.1 computes with copies of weights" in refusal
                assert said in refusal
        assert "made after" in rank.refusals["a copy in a norm"]
        # The factor of its embeddings, of which SGLang makes a random number with load_format=dummy.
        assert ("model.normalizer" in rank.refusals["random buffers"]) == (family == "gemma2")
        wider = {"gpt_oss": "gate_up_proj_bias", "qwen3_next": "A_log"}.get(family, "")
        assert wider in rank.refusals["no room to cast in"]
        joined = family in ("deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25")
        assert ("joins it with other weights" in rank.refusals["FP32"]) == joined
