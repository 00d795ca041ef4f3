"""Every family in every layout: fragments of all ranks, put together, are Bridge's own export, bit for bit."""

from __future__ import annotations

import pytest

from . import mappings
from .cases import CASES, CONVERSIONS, Case
from .expected import MISC
from .report import Report


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fragments_of_all_ranks_are_bridges_own_export(case: Case, report: Report) -> None:
    found = report.of(case)
    assert found["wrong"] == []
    assert found["weights"] > 40


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_weights_without_a_safe_rule_take_the_misc_path(case: Case, report: Report) -> None:
    reasons = report.of(case)["reasons"]
    expected = MISC.get(case.family, ())
    assert {reason for _, reason in expected} == set(reasons.values())
    for name, reason in reasons.items():
        assert any(part in name and reason == why for part, why in expected), (name, reason)


@pytest.mark.parametrize("tensor_parallel", CONVERSIONS, ids=str)
@pytest.mark.parametrize("name", mappings.CONVERSIONS)
def test_a_rule_places_what_its_mapping_class_converts(
    name: str, tensor_parallel: Case, report: Report
) -> None:
    assert report.of(tensor_parallel)[name] == []
