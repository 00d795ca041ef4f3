"""Kimi-K2 and Kimi-K2.5 from Megatron into a vLLM with their experts in INT4: what arrives is what vLLM loads of Bridge's export in INT4.

Bridge makes the codes of Kimi-K2.5 itself. Kimi-K2's, as Kimi-K2-Thinking has them, are made of its export in BF16, and Bridge of a
checkpoint in BF16: of one in INT4 it finds no experts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from vllm_fp8_ranks import write_kimi_case
from vllm_int4 import MARLIN
from vllm_kimi_ranks import serve

from rlrefit.integration.control import open_rendezvous
from tests.families.kimi_trainer import RANKS, train
from tests.spawn import PATIENT_S, run_ranks
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
    exports = [str(tmp_path / f"exported {version}") for version in range(2)]
    with closing(open_rendezvous("127.0.0.1", RANKS, RANKS)) as server, ThreadPoolExecutor(1) as beside:
        meeting = server.rendezvous.to_json()
        trainers = beside.submit(run_ranks, train, RANKS, meeting, trained, exports, timeout_s=PATIENT_S)
        engines = run_ranks(serve, RANKS, meeting, case, exports, timeout_s=PATIENT_S, made_by=vllm_processes)
        refused = trainers.result()
    assert [wrong for wrong, _ in engines] == [[[], []]] * RANKS
    routers = {f"{prefix}model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")}
    assert all(found.keys() == routers for found in refused)
    assert engines[0][1] == {"bulk": bulk, "misc": 2, "unused": 0}
