"""What the tests of TensorRT-LLM share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from .package_double import OURS, modules_of
from .serialization_double import GENERATIONS


@pytest.fixture(params=list(GENERATIONS))
def generation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def extension(generation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Our worker extension, over the package's double of one generation, in this process."""
    for name, module in modules_of(generation).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(OURS[1]).HostMemoryRefit
    for name in OURS:
        sys.modules.pop(name, None)
