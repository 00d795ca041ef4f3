"""Recipes whose data are in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrefit.recipes.config.load import ConfigError, load_config


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Overrides that point at data files that exist."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return [f"data.train={file}", f"data.validation={file}"]


@pytest.fixture
def violations(data: list[str]):
    """The violations of a recipe with some overrides; empty if it can run."""

    def of(*overrides: str, recipe: str = "grpo_tiny") -> tuple[str, ...]:
        try:
            load_config(recipe, [*data, *overrides])
        except ConfigError as error:
            return error.violations
        return ()

    return of
