"""The table of frameworks in docs/support.md beside what the adapters themselves say and what tests there are."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from rlrefit.workers.frameworks.nemo_rl import contract as nemo_rl_contract
from rlrefit.workers.frameworks.verl import full_tensors_contract as verl_contract

ROOT = Path(__file__).parents[2]
SUPPORT = (ROOT / "docs" / "support.md").read_text()
(TABLE,) = re.findall(r"<!-- frameworks -->\n(.*?)<!-- /frameworks -->", SUPPORT, re.DOTALL)
HEAD, _, *ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()]
VERSIONS = {"verl": verl_contract.TESTED, "NeMo-RL": nemo_rl_contract.READ_AT[:9]}
ANSWERS = ("yes", "no", "not tried")
CLAIMS = ("trainers", "engines", "colocated", "FP8 on the wire", "elastic", "ran on")

_SHARDS = "verl_adapter/test_shards.py::"
_UPDATES = "verl_adapter/test_updates.py::test_two_changed_updates_arrive_bit_for_bit_over_one_group"
_VERL_ON_GPU = "gpu/test_verl_on_gpu.py::test_three_changed_updates_land_in_the_live_parameters_bit_for_bit"
_TURNS = "nemo_rl_adapter/test_shard_to_shard.py::"
_NEMO_RL_FULL = (
    "nemo_rl_adapter/test_full_tensors.py::test_two_changed_updates_arrive_bit_for_bit_over_one_group"
)
# What each cell rests on: its words, and tests under tests/ that show them. A cell that denies has no entry.
SHOWN: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "rlrefit.workers.frameworks.verl.engine": {
        "trainers": (
            "FSDP2, Megatron-Bridge (Megatron's modules, outside verl's engine)",
            (
                f"{_SHARDS}test_two_changed_updates_land_in_the_live_parameters_bit_for_bit",
                "verl_adapter/test_megatron.py::test_shards_of_a_megatron_engine_reach_an_engine_bit_for_bit_twice",
            ),
        ),
        "engines": (
            "vLLM",
            (f"{_SHARDS}test_after_each_update_engines_answer_from_its_weights_and_from_no_older_cache",),
        ),
        "colocated": (
            "yes: the legacy trainer, by its manager key (that trainer was tried by hand)",
            (f"{_SHARDS}test_the_manager_for_shared_gpus_reaches_the_live_parameters_over_one_group",),
        ),
        "FP8 on the wire": (
            "yes: the actors quantize (on CPUs, by loading alone)",
            (
                "verl_adapter/test_fp8.py::test_codes_and_scales_of_the_actors_make_twice_the_engine_that_vllm_loads",
                "vllm/test_vllm_fp8_under_verl.py::test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads",
            ),
        ),
        "elastic": (
            "yes",
            (
                f"{_SHARDS}test_a_replica_that_is_added_gets_all_weights_with_the_next_update",
                f"{_SHARDS}test_a_killed_vllm_worker_ends_the_update_and_the_rest_goes_on",
            ),
        ),
        "ran on": (
            "CPUs, GPUs",
            (
                f"{_SHARDS}test_two_changed_updates_land_in_the_live_parameters_bit_for_bit",
                _VERL_ON_GPU,
            ),
        ),
    },
    "rlrefit.workers.frameworks.verl.full_tensors": {
        "trainers": ("any, by verl's export (a double of it, and FSDP2)", (_UPDATES, _VERL_ON_GPU)),
        "engines": (
            "any, by verl's loading (a double of it, and vLLM; SGLang not tried)",
            (_UPDATES, _VERL_ON_GPU),
        ),
        "elastic": (
            "yes",
            (
                "verl_adapter/test_updates.py::test_adding_and_removing_a_replica_starts_a_new_epoch",
                "verl_adapter/test_updates.py::test_a_rollout_worker_killed_in_an_update_ends_it_and_the_rest_goes_on",
            ),
        ),
        "ran on": ("CPUs, GPUs", (_UPDATES, _VERL_ON_GPU)),
    },
    "rlrefit.workers.frameworks.nemo_rl.install": {
        "trainers": (
            "Megatron, DTensor with transformers' models (such models in doubles of its workers)",
            (
                "nemo_rl_adapter/test_policies.py::test_a_megatron_policys_shards_reach_an_engine_bit_for_bit_twice",
                f"{_TURNS}test_two_changed_refits_reach_live_parameters_bit_for_bit_in_nemo_rls_order",
            ),
        ),
        "engines": (
            "vLLM",
            (f"{_TURNS}test_two_changed_refits_reach_live_parameters_bit_for_bit_in_nemo_rls_order",),
        ),
        "colocated": (
            "yes: in NeMo-RL's turns, on one host",
            (f"{_TURNS}test_on_shared_gpus_both_sides_take_turns_and_meet_in_the_first_refit",),
        ),
        "ran on": (
            "CPUs",
            (f"{_TURNS}test_two_changed_refits_reach_live_parameters_bit_for_bit_in_nemo_rls_order",),
        ),
    },
    "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine": {
        "trainers": ("any, by NeMo-RL's export (a double of it has run)", (_NEMO_RL_FULL,)),
        "engines": ("vLLM, by NeMo-RL's loading (a double of it has run)", (_NEMO_RL_FULL,)),
        "ran on": ("CPUs", (_NEMO_RL_FULL,)),
    },
}


@cache
def _tests_of(file: str) -> dict[str, str]:
    """Source of each test that pytest collects from a file under ``tests/``, and what marks the file."""
    path = ROOT / "tests" / file
    assert path.name.startswith("test_")
    text = path.read_text()
    found: dict[str, str] = {}
    marks = ""
    for node in ast.parse(text).body:
        source = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.Assign) and "pytestmark" in source.partition("=")[0]:
            marks = source
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = "".join(ast.unparse(mark) for mark in node.decorator_list)
    return {name: marks + own for name, own in found.items()}


def _module(row: list[str]) -> str:
    (found,) = re.findall(r"`(rlrefit\.[\w.]+)`", row[HEAD.index("what travels")])
    return str(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_a_row_names_the_version_that_is_checked_a_module_that_exists_and_a_page(row: list[str]) -> None:
    told = dict(zip(HEAD, row, strict=True))
    name, page = re.fullmatch(r"\[(.+)\]\((.+)\)", told["framework"]).groups()
    text = (ROOT / "docs" / page).read_text()
    assert VERSIONS[name] in told["version"]
    assert VERSIONS[name] in text
    assert importlib.util.find_spec(_module(row))
    assert _module(row) in text
    for column in ("colocated", "FP8 on the wire", "elastic"):
        assert told[column].startswith(ANSWERS), column


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_every_cell_that_claims_something_has_tests_and_the_words_that_these_allow(row: list[str]) -> None:
    told, shown = dict(zip(HEAD, row, strict=True)), SHOWN[_module(row)]
    claimed = {column: told[column] for column in CLAIMS if not re.match(r"no\b|not tried", told[column])}
    assert claimed == {column: words for column, (words, _) in shown.items()}
    for column, (words, tests) in shown.items():
        assert tests
        for test in tests:
            file, _, name = test.partition("::")
            assert name in _tests_of(file), f"{column}: no such test, {test}"
            assert "skip" not in _tests_of(file)[name] or file.startswith("gpu/"), test
        if column == "ran on":
            assert any(test.startswith("gpu/") for test in tests) == ("GPUs" in words)
    assert len(SHOWN) == len(ROWS)
