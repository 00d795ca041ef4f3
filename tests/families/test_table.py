"""The README's table of families is what the walk and the catalogue say."""

from __future__ import annotations

import pytest

from rlrefit.workers.catalog import bundled_models

from .report import Report, examine_all
from .table import section, true_share, written

AHEAD = (examine_all,)
pytestmark = pytest.mark.timeout(900)


def test_the_readme_says_what_the_tests_found(report: Report) -> None:
    assert written() == section(report), "run python -m tests.families.table"


@pytest.mark.parametrize("name", bundled_models())
def test_almost_all_bytes_of_true_shapes_go_shard_to_shard(name: str) -> None:
    if name.startswith("gpt-oss"):
        assert true_share(name) > 0.3
    else:
        assert true_share(name) > 0.999
