"""The long work of these tests, done ahead: training in all layouts, and vLLM with what it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.spawn import run_alone, run_ranks
from tests.vllm_processes import vllm_processes

from .ranks import Case, run
from .vllm_side import ENVIRONMENT, serve

LAYOUTS: dict[str, tuple[str, dict[str, int] | None]] = {
    "fsdp": ("qwen3", None),
    "fsdp-moe": ("qwen3-moe", None),
    "tp2": ("qwen3", {"tensor_parallel": 2}),
    "ep2": ("qwen3-moe", {"tensor_parallel": 2, "expert_parallel": 2}),
}


@dataclass(frozen=True)
class Trained:
    """What the ranks found.

    Attributes:
        folder: of the checkpoints ``qwen3`` and ``qwen3-moe``, and of what each layout wrote, ``of-…``.
        reports: by layout, of each rank.
        vllm: what vLLM made of the written checkpoints.
    """

    folder: Path
    reports: dict[str, list[dict[str, Any]]]
    vllm: dict[str, Any]


def train_in_all_layouts(folder: Path) -> Trained:
    for kind in ("qwen3", "qwen3-moe"):
        make_checkpoint(kind, folder / kind)
    cases = [Case(str(folder / kind), folder / f"of-{name}", how) for name, (kind, how) in LAYOUTS.items()]
    by_rank = run_ranks(run, 2, cases)
    reports = {name: [of_rank[i] for of_rank in by_rank] for i, name in enumerate(LAYOUTS)}
    a, b, experts = (str(folder / f"of-{layout}") for layout in ("fsdp", "tp2", "fsdp-moe"))
    return Trained(
        folder, reports, run_alone(serve, a, b, experts, environment=ENVIRONMENT, made_by=vllm_processes)
    )
