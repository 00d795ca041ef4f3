"""Live refits of vLLM models in parallel layouts, of every family: what it holds afterwards is what it loads itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_checkpoints import PLAIN_EXPERTS, dense_config, moe_config, quantize_checkpoint, write_checkpoint
from vllm_ranks import BIASED_ROUTER, Case, Layout, RankResult, refit_there_and_back

from rlrefit.integration.layout import overlap
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.families.checkpoints import config_of, has_prediction, write_pair
from tests.families.expected import UNREAD, VLLM, is_of, is_prediction
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_cpu import PACKS_EXPERTS
from tests.vllm_processes import vllm_processes

CONFIGS = {
    "dense": dense_config(),
    "one_kv_head": dense_config(kv_heads=1),
    "tied": dense_config(tied=True),
    "dense_fp32": dense_config(),
    "tied_fp32": dense_config(tied=True),
    "moe": moe_config(),
    "moe_packable": moe_config(expert_size=32),
    "fp8": dense_config(),
}
# Packed layouts are tried in float32, which oneDNN packs on every x86 CPU.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense packed": ("dense_fp32", {"packed": True}),
    "tied": ("tied", {}),
    "tied packed": ("tied_fp32", {"packed": True}),
    "moe": ("moe", {}),
    "moe packable": ("moe_packable", {}),
    "fp8": ("fp8", {}),
    "quantized online": ("dense", {"more": {"quantization": "fp8"}}),
    "dense TP2": ("dense", {"layout": Layout(tensor=2)}),
    "replicated KV head TP2": ("one_kv_head", {"layout": Layout(tensor=2)}),
    "moe TP2": ("moe", {"layout": Layout(tensor=2)}),
    "moe EP2": ("moe", {"layout": Layout(tensor=2, expert=True)}),
    "tied PP2": ("tied", {"layout": Layout(pipeline=2)}),
    "dense TP2 packed": ("dense_fp32", {"layout": Layout(tensor=2), "packed": True}),
    "fp8 TP2": ("fp8", {"layout": Layout(tensor=2)}),
    "dense by transformers TP2": (
        "dense",
        {"layout": Layout(tensor=2), "more": {"model_impl": "transformers"}},
    ),
    "dense with room in host memory": ("dense", {"more": {"cpu_offload_gb": 1}}),
}
# One case of two ranks, or one whose experts are packed, has all that these have.
_MORE = {"moe", "fp8"}
PACKED = [name for name, (_, options) in LAYOUTS.items() if options.get("packed")]
# Experts of a size that stays as it is loaded or, of a vLLM that packs all on CPUs, is packed without padding on two ranks too.
_SIZE = 64 if PACKS_EXPERTS else PLAIN_EXPERTS
_EXPERTS = {"moe_intermediate_size": _SIZE}
_NORMALIZED = {"norm_topk_prob": True, **_EXPERTS}
_BIASED = BIASED_ROUTER | _EXPERTS
# Family → what its configuration has in published checkpoints, and vLLM goes by; and the experts' size.
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "llama",
            "qwen2",
            "qwen3",
            "qwen3-tied",
            "mistral",
            "gemma2",
            "gemma3",
            "nemotron_h",
            "nemotron_h-latent",
            "qwen3_vl",
            "qwen3_5_text",
            "qwen3_5",
            "qwen2_5_vl",
            "gemma3-vl",
            "gemma4",
            "gemma4-shared",
            "gemma4-vl",
            "gemma4-shared-vl",
        )
    },
    **dict.fromkeys(
        (
            *("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe-stacked", "qwen3_5_moe-vl"),
            *("gemma4-moe", "gemma4-moe-vl"),
        ),
        _EXPERTS,
    ),
    "bailing_moe_v2": {"use_rmsnorm": True, **_EXPERTS},
    "qwen3_vl_moe": _NORMALIZED,
    **{name: {"intermediate_size": _SIZE} for name in ("mixtral", "gpt_oss", "minimax_m2")},
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), _NORMALIZED),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25", "glm_moe_dsa"), _BIASED),
}
# A vocabulary that vLLM does not pad on two ranks.
UNPADDED = {"vocab_size": 64, "max_position_embeddings": 256}
# What a change tries of .venv's vLLM: a family for each kind of a part. The newer vLLMs of make test-engines, and make test-all, have all
# of them.
_OF_EACH_KIND = {
    "nemotron_h",  # state spaces
    "qwen3_vl",  # images
    "qwen3_next",  # linear attention
    "gemma4-moe",  # keys that are values, and experts beside an MLP
    "gpt_oss",  # biases of experts, and sinks
    "deepseek_v3",  # latent attention, and biases of routers
    "glm_moe_dsa",  # an indexer
}
IN_MORE_FAMILIES = [f"{family} TP2" for family in FAMILIES if family not in _OF_EACH_KIND]
IN_FAMILIES = left_to_all([f"{family} TP2" for family in FAMILIES], IN_MORE_FAMILIES)
# What one rank takes whole two take in part, by the same code of the family's; LAYOUTS has whole weights too.
ALONE = [f"{family} TP1" for family in FAMILIES]
_OF_FAMILIES = [*IN_FAMILIES, *(pytest.param(case, marks=pytest.mark.full) for case in ALONE)]
# Of a vLLM that has a class of its own for some routers, and packs all experts on CPUs, padded to sizes of its kernel.
OWN_PARTS = (("mlp.gate.", "of its own class"),) if PACKS_EXPERTS else ()
PADDED_PARTS = (("experts.", "padded"),) if PACKS_EXPERTS else ()


class Results(dict[str, list[RankResult]]):
    """By case; a test of one that vLLM itself has no kernels for on CPUs is left out, with vLLM's words."""

    def __getitem__(self, case: str) -> list[RankResult]:
        found = super().__getitem__(case)
        if isinstance(found[0], str):
            assert PACKS_EXPERTS
            pytest.skip(f"vLLM on this CPU: {found[0]}")
        return found


def in_layouts(folder: Path, *, more: bool) -> dict[str, Case]:
    """A case of each of them, or of those that are left to make test-all."""
    pairs: dict[str, tuple[str, str]] = {}
    wanted = {name: case for name, case in LAYOUTS.items() if (name in _MORE) == more}
    for name in dict.fromkeys(model for model, _ in wanted.values()):
        config = CONFIGS[name]
        dtype = torch.float32 if name.endswith("fp32") else torch.bfloat16
        a, b = (write_checkpoint(folder / f"{name}_{seed}", config, seed, dtype) for seed in (1, 2))
        if name == "fp8":
            quantize_checkpoint(a)
            quantize_checkpoint(b)
        pairs[name] = str(a), str(b)
    return {name: Case(*pairs[model], **options) for name, (model, options) in wanted.items()}


def refit_all_cases(folder: Path) -> Results:
    """Every number of ranks is one group of processes."""
    cases = in_layouts(folder, more=False)
    found = Results()
    for ranks in (1, 2):
        own = {name: case for name, case in cases.items() if case.layout.ranks == ranks}
        if ranks == 2:
            own |= in_families(folder, ranks, _OF_EACH_KIND)
        found |= refit_on(ranks, own)
    return found


def in_families(folder: Path, ranks: int, families: Collection[str]) -> dict[str, Case]:
    """A case of each of them."""
    return {
        f"{family} TP{ranks}": Case(
            # Published biases of routers are in FP32.
            *write_pair(
                family, folder / f"on {ranks}" / family, UNPADDED | changes, router_dtype=torch.float32
            ),
            Layout(tensor=ranks),
            family=True,
        )
        for family, changes in FAMILIES.items()
        if family in families
    }


def refit_on(ranks: int, cases: dict[str, Case]) -> dict[str, list[RankResult]]:
    by_rank = run_ranks(
        refit_there_and_back, ranks, list(cases.values()), timeout_s=PATIENT_S, made_by=vllm_processes
    )
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


@of_all_tests
def refit_more_cases(folder: Path) -> Results:
    alone = in_layouts(folder, more=True) | in_families(folder, 1, FAMILIES)
    return Results(refit_on(1, alone) | refit_on(2, in_families(folder, 2, FAMILIES.keys() - _OF_EACH_KIND)))


AHEAD = (refit_all_cases, refit_more_cases)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> Results:
    return found_ahead.by(refit_all_cases)


@pytest.fixture(scope="module")
def more(found_ahead: FoundAhead) -> Results:
    return found_ahead.by(refit_more_cases)


@pytest.fixture
def ranks(case: str, request: pytest.FixtureRequest) -> list[RankResult]:
    """What each rank of a case saw."""
    found: Results = request.getfixturevalue(
        "more" if case in {*ALONE, *IN_MORE_FAMILIES, *_MORE} else "results"
    )
    return found[case]


@pytest.mark.parametrize("case", [*left_to_all(LAYOUTS, _MORE), *_OF_FAMILIES])
def test_a_refit_gives_what_vllm_loads_from_the_new_checkpoint_and_back_again(
    ranks: list[RankResult], case: str
):
    occasions = ["there", "back", *([] if case in LAYOUTS else ["all through the loader"])]
    for rank in ranks:
        assert rank.differing == {occasion: [] for occasion in occasions}
        assert rank.alike == [] or case in LAYOUTS
        assert rank.process_state_untouched


@pytest.mark.parametrize("case", _OF_FAMILIES)
def test_all_of_a_family_that_vllm_holds_as_it_is_loaded_goes_in_place(ranks: list[RankResult], case: str):
    family = case.rpartition(" ")[0]
    # Mixtral stands in no table: no trainer of these tests has it.
    parts = (*VLLM.misc.get(family, ()), *OWN_PARTS)
    layers = config_of(family, short=True)["num_hidden_layers"]
    for rank in ranks:
        assert len(rank.bulk) > 10
        assert all(any(part in name for name in rank.misc) for part, _ in VLLM.misc.get(family, ()))
        assert [name for name in rank.misc if not is_of(name, parts)] == []
        predictions = {name for name in rank.unused if is_prediction(name, layers)}
        unused = set(rank.unused) - predictions
        if unused == UNREAD.get(family):
            unused = set()
        # Of what all ranks add up the first one has the bias, and the others have zeros.
        zeros = case == "gpt_oss TP2" and rank is not ranks[0]
        assert [name for name in unused if not name.endswith("down_proj_bias")] == []
        assert len(unused) == (layers if zeros else 0)
        assert bool(predictions) == has_prediction(family)


@pytest.mark.parametrize("case", _OF_FAMILIES)
def test_no_rank_wants_an_element_of_a_weight_twice(ranks: list[RankResult], case: str):
    for rank in ranks:
        assert {name: boxes for name, boxes in rank.bulk.items() if overlap(boxes) is not None} == {}


def test_every_family_of_the_table_is_refitted_here():
    assert {*VLLM.misc, "mixtral"} == {*FAMILIES}


@pytest.mark.parametrize(
    "case",
    [
        *left_to_all(["tied", "moe", "moe packable", "dense TP2", "moe TP2", "moe EP2", "tied PP2"], _MORE),
        *("dense by transformers TP2", "dense with room in host memory"),
    ],
)
def test_weights_that_are_not_padded_all_take_the_bulk_path(ranks: list[RankResult], case: str):
    parts = OWN_PARTS if case == "moe packable" else (*OWN_PARTS, *PADDED_PARTS)
    for rank in ranks:
        assert {name for name in rank.misc if not is_of(name, parts)} == set()


@pytest.mark.parametrize(
    ("case", "name", "first", "second"),
    [
        ("dense TP2", "layers.0.self_attn.q_proj", ((0, 64), (0, 64)), ((64, 128), (0, 64))),
        ("dense TP2", "layers.1.mlp.down_proj", ((0, 64), (0, 48)), ((0, 64), (48, 96))),
        ("replicated KV head TP2", "layers.0.self_attn.k_proj", ((0, 32), (0, 64)), ((0, 32), (0, 64))),
    ],
)
def test_tensor_parallel_ranks_want_the_two_halves_and_a_replicated_head_both(
    results: Results, case: str, name: str, first: Any, second: Any
):
    assert [rank.bulk[f"model.{name}.weight"] for rank in results[case]] == [[first], [second]]


def test_the_padded_vocabulary_is_no_part_of_any_box(results: Results):
    assert [rank.parameters["lm_head.weight"] for rank in results["dense TP2"]] == [(64, 64)] * 2
    boxes = [rank.bulk["lm_head.weight"] for rank in results["dense TP2"]]
    assert boxes == [[((0, 64), (0, 64))], [((64, 120), (0, 64))]]


def test_expert_parallel_ranks_want_their_own_experts_whole(results: Results):
    for rank, own in zip(results["moe EP2"], ({"0", "1"}, {"2", "3"}), strict=True):
        wanted = {name for name in rank.bulk | rank.misc if ".mlp.experts." in name}
        assert {name.split(".")[5] for name in wanted} == own
        if PACKS_EXPERTS:
            continue  # which come whole, being padded
        assert all(box == ((0, 24), (0, 64)) for n in wanted if "gate_proj" in n for box in rank.bulk[n])


def test_pipeline_stages_want_their_own_layers_and_the_tied_embedding_on_both(results: Results):
    first, second = (rank.bulk.keys() for rank in results["tied PP2"])
    assert first & second == {"model.embed_tokens.weight"}
    assert not any(".layers.1." in name for name in first)
    assert not any(".layers.0." in name for name in second)
    assert first | second == results["tied"][0].bulk.keys()


@pytest.mark.parametrize("case", ["dense packed", "dense TP2 packed"])
def test_packed_linear_weights_go_to_misc_and_say_so(results: Results, case: str):
    for rank in results[case]:
        assert not any("_proj" in name for name in rank.bulk)
        assert "changed the shape" in rank.misc["model.layers.0.mlp.down_proj.weight"]
        assert "oneDNN" in rank.misc["lm_head.weight"]
        assert "model.norm.weight" in rank.bulk


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize(
    ("what", "told"), [("a part", "uninitialised"), ("nothing", "incomplete"), ("twice", "q_proj")]
)
def test_what_comes_in_part_or_twice_is_an_error_and_the_old_weights_stay(
    results: Results, case: str, what: str, told: str
):
    for rank in results[case]:
        text, differing = rank.failures[what]
        assert told in text
        assert differing == []


@pytest.mark.parametrize("case", left_to_all(["fp8", "quantized online", "fp8 TP2"], _MORE))
def test_an_fp8_engine_is_reloaded_and_processed_once_in_each_refit(
    results: Results, ranks: list[RankResult], case: str
):
    """After start-up its parameters are plain and transposed, and the model's own loader dies of them half-way."""
    for rank in ranks:
        assert rank.bare_load in (
            "AttributeError",
            "AssertionError",
            "RuntimeError",
            "TypeError",
            "ValueError",
        )
        assert not any("_proj" in name for name in rank.bulk)
        assert "model.layers.1.mlp.up_proj.weight" in rank.misc
        assert "model.norm.weight" in rank.bulk
        assert rank.processed == [{1}, {1}]
    assert all(rank.processed == [set(), set()] for rank in results["dense TP2"])


@pytest.mark.parametrize("case", left_to_all(LAYOUTS, _MORE))
def test_a_manifest_without_any_one_tensor_is_refused_by_the_ranks_that_want_it(
    ranks: list[RankResult], case: str
):
    for rank in ranks:
        refused, taken = rank.without
        assert len(refused | taken) > 11
        assert refused == {*rank.bulk, *rank.misc} & (refused | taken)
