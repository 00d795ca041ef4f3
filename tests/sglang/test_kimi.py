"""Kimi-K2.5 from Megatron into an SGLang with its experts in INT4: what arrives is what SGLang loads of Bridge's own export in INT4.

``make test-sglang`` runs it. Nothing is generated.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rlrefit.integration.control import open_rendezvous
from tests.families.kimi_trainer import RANKS, train
from tests.spawn import run_alone, run_ranks

from .int4_ranks import written_kimi
from .kimi_ranks import serve

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]


def test_two_refits_by_bridges_rule_leave_what_sglang_loads_of_bridges_own_int4(tmp_path: Path) -> None:
    case = run_alone(written_kimi, tmp_path, environment={})
    exports = [str(tmp_path / f"exported {version}") for version in range(2)]
    with closing(open_rendezvous("127.0.0.1", RANKS, RANKS)) as server, ThreadPoolExecutor(1) as beside:
        meeting = server.rendezvous.to_json()
        trainers = beside.submit(run_ranks, train, RANKS, meeting, case.served[0], exports, timeout_s=400)
        engines = run_ranks(serve, RANKS, meeting, case, exports, timeout_s=400)
        refused = trainers.result()
    assert [wrong for wrong, _ in engines] == [[[], []]] * RANKS
    routers = {
        f"language_model.model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")
    }
    assert all(found.keys() == routers for found in refused)
    assert engines[0][1] == {"bulk": 86, "misc": 2, "unused": 0}
