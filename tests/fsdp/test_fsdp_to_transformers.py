"""From real FSDP2 ranks, between steps of a real optimizer, to real transformers engines: bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ahead import FoundAhead, left_to_all, of_all_tests

from .models import KINDS, make_model
from .ranks import Layout
from .worlds import VERSIONS, Case, run_cases

SHARDS, GOLDEN, CONVENTIONAL = ("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")


@dataclass(frozen=True)
class _Case:
    kind: str
    layout: Layout
    gen_tp: int = 2
    refit_dtype: torch.dtype | None = torch.bfloat16
    ways: tuple[tuple[str, str], ...] = (SHARDS,)


CASES = {
    "qwen3, one rank": _Case("qwen3", Layout(1)),
    "qwen3, FSDP2, all three ways": _Case("qwen3", Layout(2), ways=(SHARDS, GOLDEN, CONVENTIONAL)),
    "qwen3, FSDP4 to TP1 x DP2": _Case("qwen3", Layout(4), gen_tp=1),
    "tied embeddings in BF16, HSDP 2x2": _Case(
        "qwen3-tied", Layout(2, replicate=2, dtype=torch.bfloat16), refit_dtype=None
    ),
    "qwen3, FSDP2 x TP2": _Case("qwen3", Layout(2, tensor=2)),
    "tied embeddings, FSDP2 x TP2, never resharded, to TP1 x DP2": _Case(
        "qwen3-tied", Layout(2, tensor=2, reshard=False), gen_tp=1
    ),
    "qwen3, FSDP2 over columns": _Case("qwen3", Layout(2, columns=True)),
    "qwen3-moe, FSDP4 of six experts": _Case("qwen3-moe", Layout(4)),
    "qwen3-moe, HSDP 2x2, not resharded": _Case("qwen3-moe", Layout(2, replicate=2, reshard=False)),
    "qwen3-moe, FSDP2 x EP2": _Case("qwen3-moe", Layout(2, expert=2), ways=(SHARDS, CONVENTIONAL)),
    "qwen3, FSDP2 x transformers' own TP2": _Case(
        "qwen3", Layout(2, tensor=2, own_plan=True), ways=(SHARDS, CONVENTIONAL)
    ),
    "qwen3-moe, FSDP2 x transformers' own TP2": _Case("qwen3-moe", Layout(2, tensor=2, own_plan=True)),
    "qwen3-moe, FSDP2 x transformers' own EP2": _Case("qwen3-moe", Layout(2, expert=2, own_plan=True)),
    "qwen3, FSDP2 on the CPU": _Case("qwen3", Layout(2, offload=True)),
    "FP32 for an engine of BF16": _Case("qwen3", Layout(2), refit_dtype=None),
}
# Their parts are in others: four shards, engines of TP1, replicas, experts, TP, parameters that stay gathered, transformers' own plans,
# and engines of BF16.
ALONE = (
    "qwen3, FSDP2 x TP2",
    "qwen3, FSDP4 to TP1 x DP2",
    "qwen3-moe, HSDP 2x2, not resharded",
    "qwen3-moe, FSDP2 x transformers' own TP2",
)
Reports = dict[str, tuple[list[Any], list[Any]]]


def run_all_cases(folder: Path) -> Reports:
    """What all ranks saw in the cases of each change."""
    return _run(folder, [name for name in CASES if name not in ALONE])


@of_all_tests
def run_cases_alone(folder: Path) -> Reports:
    """And in those whose parts others have."""
    return _run(folder, ALONE)


def _run(folder: Path, names: Sequence[str]) -> Reports:
    models = {kind: make_model(kind, folder / kind) for kind in KINDS}
    cases = []
    for number, case in enumerate(CASES[name] for name in names):
        own = folder / f"case{number}"
        own.mkdir()
        cases.append(Case(own, models[case.kind], case.layout, case.gen_tp, case.refit_dtype, case.ways))
    return dict(zip(names, run_cases(cases), strict=True))


AHEAD = (run_all_cases, run_cases_alone)


_ALL = left_to_all(CASES, ALONE)


@pytest.mark.parametrize("name", _ALL)
def test_engines_hold_what_transformers_saves_after_every_step(name: str, found_ahead: FoundAhead) -> None:
    trainers, engines = found_ahead.by(run_cases_alone if name in ALONE else run_all_cases)[name]
    for report in engines:
        assert [epoch["wrong"] for epoch in report] == [[] for _ in CASES[name].ways]
        assert [epoch["version"] for epoch in report] == [VERSIONS - 1 for _ in CASES[name].ways]
    # Names and gathered values are those of save_pretrained.
    assert [epoch["wrong"] for epoch in trainers[0]] == [[] for _ in CASES[name].ways]
    first = [rank[0] for rank in trainers if rank]
    assert all(trainer["prepared"]["refused"] == {} for trainer in first)
    manifest = first[0]["manifest"]
    if name == "FP32 for an engine of BF16":
        assert manifest["bulk"] == 0
    else:
        assert (manifest["misc"], manifest["unused"]) == (0, 0)
        # Replicas share the sending, and each rank sends its shards.
        assert min(trainer["records"][0]["bytes_bulk"] for trainer in first) > 0
