"""The families in the layouts that each change leaves out, and the pages' tables of all layouts: ``make test-all``."""

from __future__ import annotations

import pytest

from .cases import REST, Case
from .report import Report, examine_covering, examine_rest
from .table import PAGE, SUPPORT, page, support, written
from .test_families import check

AHEAD = (examine_covering, examine_rest)
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("case", REST, ids=str)
def test_a_family_in_a_layout(case: Case, rest: Report) -> None:
    check(case, rest)


def test_the_pages_say_what_was_found(report: Report, rest: Report) -> None:
    remedy = "run python -m tests.families.table"
    assert written(SUPPORT) == support(report | rest), remedy
    assert written(PAGE) == page(report | rest), remedy
