"""Recipes whose data are in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes.config.load import ConfigError, TrainConfig, load_config


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Overrides that point at data files that exist."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return [f"data.train={file}", f"data.validation={file}"]


@pytest.fixture
def violations(data: list[str]) -> Callable[..., tuple[str, ...]]:
    """The violations of a recipe with some overrides; empty if it can run."""

    def of(*overrides: str, recipe: str = "grpo_tiny") -> tuple[str, ...]:
        try:
            load_config(recipe, [*data, *overrides])
        except ConfigError as error:
            return error.violations
        return ()

    return of


@pytest.fixture(scope="session")
def config_of() -> Callable[[dict[str, Any]], TrainConfig]:
    """The schema's defaults with some values changed."""

    def make(values: dict[str, Any]) -> TrainConfig:
        config = TrainConfig()
        for key, value in values.items():
            *sections, name = key.split(".")
            setattr(reduce(getattr, sections, config), name, value)
        return config

    return make
