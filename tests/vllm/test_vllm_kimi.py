"""Kimi-K2 and Kimi-K2.5 from Megatron into a vLLM with their experts in INT4: what arrives is what vLLM loads of Bridge's export in INT4.

Bridge makes the codes of Kimi-K2.5 itself. Kimi-K2's, as Kimi-K2-Thinking has them, are made of its export in BF16, and Bridge of a
checkpoint in BF16: of one in INT4 it finds no experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fp8_ranks import write_kimi_case
from vllm_int4 import MARLIN
from vllm_kimi_ranks import serve

from tests.families.kimi_trainer import check_refits
from tests.vllm_processes import vllm_processes

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("family", "prefix", "bulk"), [("kimi_k2", "", 51), ("kimi_k25", "language_model.", 86)]
)
def test_two_refits_by_bridges_rule_leave_what_vllm_loads_of_bridges_export_in_int4(
    tmp_path: Path, family: str, prefix: str, bulk: int
) -> None:
    case = write_kimi_case(tmp_path, family, MARLIN)
    trained = case.trained[0] if family == "kimi_k2" else case.served.path_a
    check_refits(tmp_path, trained, serve, case, prefix, bulk, made_by=vllm_processes)
