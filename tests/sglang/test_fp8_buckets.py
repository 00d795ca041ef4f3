"""Codes and scales of the trainer in SGLang's flattened buckets: its models hold what it loads from a checkpoint of the same.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from rlrefit.workers.engines.sglang.loader import LOADER
from tests.gpu.vllm_checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .fp8_bucket_ranks import BucketCase, BucketResult, refit_in_buckets
from .fp8_ranks import CASES as LAYOUTS
from .fp8_ranks import written
from .ways import WAYS

pytestmark = [
    pytest.mark.timeout(1800),  # SGLang loads for a minute, twice, where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

TOGETHER = {
    name: options for name, options in LAYOUTS.items() if "CUTLASS" not in name and "TRT-LLM" not in name
}
# Of half of the experts on each rank, in a pair of processes of their own.
SHARED: dict[str, dict[str, Any]] = {
    "shared experts": {"experts": True},
    "shared experts, Blackwell": {"experts": True, "blackwell": True, "runner": "deep_gemm"},
}
CASES = TOGETHER | SHARED
BLACKWELL = [case for case in CASES if "Blackwell" in case]
QUANTIZING = [case for case in CASES if "before" not in case]
REFITS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[BucketResult]]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def listed(name: str, **options: Any) -> BucketCase:
        case = written(folder / name, **options)
        return BucketCase(case, quantizes=not case.quantized_before)

    plain = tuple(write_checkpoint(folder / f"plain {seed}", seed, fp8=False) for seed in (1, 2))
    found: dict[str, list[BucketResult]] = {}
    for cases in (TOGETHER, SHARED):
        wanted = [listed(name, **options) for name, options in cases.items()]
        by_rank = run_ranks(refit_in_buckets, 2, wanted, plain, cases is SHARED, timeout_s=850)
        found |= {name: [rank[i] for rank in by_rank] for i, name in enumerate(cases)}
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_way_leaves_the_bytes_that_sglang_loads_from_a_checkpoint(
    results: dict[str, list[BucketResult]], case: str
) -> None:
    for rank in results[case]:
        assert len(rank.differing) >= REFITS * len(WAYS)
        assert not any(rank.differing.values()), rank.differing
        assert not any(rank.other_numbers.values()), rank.other_numbers
        # Refused refits have changed nothing.
        assert rank.changed == {"no blocks": []}
        assert {"not quantized", "FP32", "after NaN"} <= rank.differing.keys() or case not in QUANTIZING
    versions = results[case][0].versions
    assert versions == [(version, str(version)) for version in range(REFITS * len(WAYS))]


@pytest.mark.parametrize("case", CASES)
def test_sglang_loads_buckets_itself_but_for_packed_scales(
    results: dict[str, list[BucketResult]], case: str
) -> None:
    packed = case in BLACKWELL
    for rank in results[case]:
        assert rank.taken == {LOADER if packed else "flattened_bucket"}
        assert rank.packed == (2 * 4 if packed else 0)  # of two layers: attention's two, and two of the MLP


@pytest.mark.parametrize("case", QUANTIZING)
def test_each_rank_asks_for_what_it_holds(results: dict[str, list[BucketResult]], case: str) -> None:
    experts = 0 if "dense" in case else 4 if case in SHARED else 8
    # Of two layers: attention's four, and gate, up and down of the MLP or of each expert.
    assert [rank.own for rank in results[case]] == [2 * (4 + 3 * (experts or 1))] * 2


@pytest.mark.parametrize("case", QUANTIZING)
@pytest.mark.parametrize(
    ("occasion", "said"),
    [
        ("not quantized", ("PlanError", "keep the old scales", "trainer_quantize_fp8=True")),
        ("FP32", ("PlanError", "No blocks are made of float32", "refit_dtype")),
        ("NaN", ("RefitError", "model.layers.1.self_attn.k_proj.weight")),
        ("no blocks", ("RefitMismatch", "no worker of the engine holds a weight in FP8 blocks")),
    ],
)
def test_what_can_not_be_sent_is_refused_with_the_reason(
    results: dict[str, list[BucketResult]], case: str, occasion: str, said: tuple[str, ...]
) -> None:
    text = results[case][0].refused[occasion]
    assert [part for part in said if part not in text] == [], text
