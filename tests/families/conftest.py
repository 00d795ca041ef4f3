"""One walk of four ranks through the cases of each change serves every test here, and one more those of the rest."""

from __future__ import annotations

import pytest

from tests.ahead import FoundAhead

from .report import Report, examine_covering, examine_rest


@pytest.fixture(scope="package")
def report(found_ahead: FoundAhead) -> Report:
    return found_ahead.by(examine_covering)


@pytest.fixture(scope="package")
def rest(found_ahead: FoundAhead) -> Report:
    return found_ahead.by(examine_rest)
