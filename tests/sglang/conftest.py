"""The double of SGLang's package and of an engine, for the tests that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .engine_double import EngineDouble, modules
from .ways import WAYS, Work


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=list(WAYS))
def through(request: pytest.FixtureRequest) -> Callable[[EngineDouble, Work], Any]:
    return WAYS[request.param]


@pytest.fixture
def engine(sglang: None) -> Iterator[EngineDouble]:
    yield from _started()


@pytest.fixture
def engine_that_retracts(sglang: None) -> Iterator[EngineDouble]:
    """One whose requests a refit may retract: no prefixes of theirs are kept."""
    yield from _started(disable_radix_cache=True)


def _started(**arguments: Any) -> Iterator[EngineDouble]:
    started = EngineDouble(**arguments)
    yield started
    started.loop.close()
