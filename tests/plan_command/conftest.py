"""Tiny models, and ``rlrefit plan`` of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlrefit.recipes.cli import main
from tests.catalog.shrunken import BLOCK_CONFIGS, CONFIGS


@pytest.fixture
def moe(tmp_path: Path) -> str:
    """The path of a tiny mixture of experts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return str(path)


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    """The path of a mixture of experts whose shards are whole blocks."""
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps(BLOCK_CONFIGS["qwen3_moe"]))
    return str(path)


class Told(NamedTuple):
    """What a command told; spaces and line ends of ``out`` are one space each."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Run ``rlrefit plan`` of a model, or of a recipe."""

    def run(model: str | None, train: str, gen: str, *arguments: str) -> Told:
        named = () if model is None else ("--model", model, "--train", train, "--gen", gen)
        code = main(["plan", *named, *arguments])
        out, err = capsys.readouterr()
        return Told(code, " ".join(out.split()), " ".join(err.split()))

    return run
