"""One walk of four ranks through all cases serves every test here."""

from __future__ import annotations

import pytest

from .cases import BROKEN, CASES, CHANGED, CONVERSIONS, COPIED, FEW_GROUPS
from .report import Report, examine


@pytest.fixture(scope="package")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return examine(
        [*CONVERSIONS, COPIED, FEW_GROUPS, *CHANGED, BROKEN, *CASES], tmp_path_factory.mktemp("families")
    )
