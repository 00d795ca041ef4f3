"""Kimi-K2.5 from Megatron into an SGLang with its experts in INT4: what arrives is what SGLang loads of Bridge's own export in INT4.

``make test-sglang`` runs it. Nothing is generated.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.families.kimi_trainer import check_refits
from tests.spawn import run_alone

from .int4_ranks import written_kimi
from .kimi_ranks import serve

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]


def test_two_refits_by_bridges_rule_leave_what_sglang_loads_of_bridges_own_int4(tmp_path: Path) -> None:
    case = run_alone(written_kimi, tmp_path, environment={})
    check_refits(tmp_path, case.served[0], serve, case)
