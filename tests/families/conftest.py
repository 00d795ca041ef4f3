"""One walk of four ranks through all cases serves every test here."""

from __future__ import annotations

import pytest

from tests.ahead import FoundAhead

from .report import Report, examine_all


@pytest.fixture(scope="package")
def report(found_ahead: FoundAhead) -> Report:
    return found_ahead.by(examine_all)
