"""Two trainer ranks under FSDP and an engine of two workers, each in a process of its own, for each generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ahead import FoundAhead
from tests.fsdp.models import make_model
from tests.spawn import run_ranks

from .engine_process import running
from .ranks import BUCKET_BYTES, refit
from .serialization_double import GENERATIONS


def refit_each_generation(folder: Path) -> Any:
    """Reports of both ranks, by generation."""
    checkpoint = make_model("qwen3", folder / "model")
    sockets = {generation: folder / generation for generation in GENERATIONS}
    with running(sockets, workers=2):
        return run_ranks(refit, 2, checkpoint, sockets)


AHEAD = (refit_each_generation,)


@pytest.fixture(scope="module")
def reports(found_ahead: FoundAhead) -> Any:
    return found_ahead.by(refit_each_generation)


def test_full_tensors_of_sharded_weights_reach_workers_in_other_processes(
    reports: Any, generation: str
) -> None:
    """Each worker's bytes were compared on the leader, after each of two refits with other weights."""
    leader, other = (report[generation] for report in reports)
    first, second = leader["weights"]
    assert first != second
    for sent, peak, whole in leader["seen"] + other["seen"]:
        assert sent == whole, "each rank hands all weights to the worker on its GPU"
        assert peak <= BUCKET_BYTES
    for counts in leader["counts"]:
        assert counts["buckets"] >= 4
        assert (counts["reloads"], counts["prefix_resets"]) == (2, 2)


def test_each_kind_of_weights_travels(reports: Any) -> None:
    dtypes = {generation: report["dtypes"] for generation, report in reports[0].items()}
    assert dtypes["both"] == {"torch.bfloat16"}
    assert dtypes["deny-list"] == {"torch.bfloat16", "torch.float8_e4m3fn", "torch.float32"}
    assert dtypes["allow-list"] == dtypes["deny-list"] | {"torch.uint8"}


def test_all_ranks_raise_what_one_of_them_or_a_worker_met(reports: Any, generation: str) -> None:
    of_engine, of_trainer, serves = reports[0][generation]["failures"]
    assert "TensorRT-LLM worker 0: RuntimeError: CUDA out of memory" in of_engine
    assert "trainer rank 1: OSError: Too many open files" in of_trainer
    heard = reports[1][generation]["failures"]
    assert heard == [f"trainer rank 0: {text}" for text in (of_engine, of_trainer)]
    assert serves == "serves 4"
