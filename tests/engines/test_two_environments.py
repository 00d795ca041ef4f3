"""One refit between two environments: the trainer's torch is another one than the engine's, and so may be its Python."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlrefit.recipes.run.files import read_json_lines
from tests.spawn import run_ranks, run_together
from tests.vllm_processes import vllm_processes

from .contract import RANKS as ENGINE_RANKS
from .contract import TURNS, WAYS
from .other_environment import RANKS, follow

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / ".venv" / "bin" / "python"


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        Path(sys.prefix) == TRAINER.parents[1] or not TRAINER.exists(),
        reason="needs an environment beside the trainer's .venv: make test-engines, make test-sglang",
    ),
]
# An environment has one of the two of its own.
OF_VLLM = find_spec("sglang") is None


def test_a_trainer_of_one_environment_refits_an_engine_of_another(paths: list[str], tmp_path: Path) -> None:
    engine = "vllm_rank" if OF_VLLM else "sglang_rank"
    made_by = {"made_by": vllm_processes} if OF_VLLM else {}
    seen = run_together(
        lambda: train(tmp_path, paths),
        lambda: run_ranks(follow, ENGINE_RANKS, engine, str(tmp_path), paths, timeout_s=500, **made_by),
    )[1]
    told = [json.loads((tmp_path / f"trainer{rank}.json").read_text()) for rank in range(RANKS)]
    assert len({rank["torch"] for rank in told}) == 1
    for differing, misc in seen:
        assert len(differing) == len(WAYS) * len(TURNS)
        assert not any(differing.values()), differing
        assert len(misc["nccl_xfer"]) < len(misc["packed_broadcast"])


@pytest.mark.skipif(not OF_VLLM, reason="recipes run SGLang in tests/sglang")
@pytest.mark.parametrize("more", [(), ("trainer=fsdp", "policy.qat=w4a4")], ids=["", "w4a4"])
def test_a_recipe_has_its_engine_in_an_environment_of_its_own(tmp_path: Path, more: tuple[str, ...]) -> None:
    overrides = (
        *more,
        "name=two",
        f"run_root={tmp_path}",
        "algorithm.steps=2",
        f"ray.generation_python={sys.executable}",
    )
    command = [str(TRAINER), "-m", "rlrefit.recipes.cli", "train", "recipe=grpo_tiny_vllm", *overrides]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout
    rows = read_json_lines(tmp_path / "two" / "metrics.jsonl")
    assert [row["weights/version"] for row in rows] == [0, 1]
    # Another release computes with other kernels.
    assert max(row["generation_kl"] for row in rows) < 1e-2


def train(folder: Path, paths: list[str]) -> None:
    """Run the trainer's ranks to their end; the first that fails ends the others, by the refit."""
    command = [str(TRAINER), "-m", "tests.engines.other_environment", str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), *paths], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=500)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text
