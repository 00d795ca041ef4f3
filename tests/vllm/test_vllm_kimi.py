"""Kimi-K2.5 from Megatron into a vLLM with its experts in INT4: what arrives is what vLLM loads of Bridge's own export in INT4."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fp8_ranks import write_kimi_case
from vllm_int4 import MARLIN
from vllm_kimi_ranks import serve

from tests.families.kimi_trainer import check_refits
from tests.vllm_processes import vllm_processes

pytestmark = pytest.mark.timeout(600)


def test_two_refits_by_bridges_rule_leave_what_vllm_loads_of_bridges_own_int4(tmp_path: Path) -> None:
    case = write_kimi_case(tmp_path, "kimi_k25", MARLIN)
    check_refits(tmp_path, case.served.path_a, serve, case, made_by=vllm_processes)
