"""Kimi-K2.5 from Megatron into a vLLM with its experts in INT4: what arrives is what vLLM loads of Bridge's own export in INT4."""

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


def test_two_refits_by_bridges_rule_leave_what_vllm_loads_of_bridges_own_int4(tmp_path: Path) -> None:
    case = write_kimi_case(tmp_path, "kimi_k25", MARLIN)
    exports = [str(tmp_path / f"exported {version}") for version in range(2)]
    with closing(open_rendezvous("127.0.0.1", RANKS, RANKS)) as server, ThreadPoolExecutor(1) as beside:
        meeting = server.rendezvous.to_json()
        trainers = beside.submit(
            run_ranks, train, RANKS, meeting, case.served.path_a, exports, timeout_s=PATIENT_S
        )
        engines = run_ranks(serve, RANKS, meeting, case, exports, timeout_s=PATIENT_S, made_by=vllm_processes)
        refused = trainers.result()
    assert [wrong for wrong, _ in engines] == [[[], []]] * RANKS
    routers = {
        f"language_model.model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")
    }
    assert all(found.keys() == routers for found in refused)
    assert engines[0][1] == {"bulk": 86, "misc": 2, "unused": 0}
