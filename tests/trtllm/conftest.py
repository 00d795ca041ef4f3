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
def extension(generation: str) -> Iterator[type]:
    """Our worker extension, over the package's double of each generation, in this process."""
    yield from extension_over(generation)


@pytest.fixture
def newest_extension() -> Iterator[type]:
    """The same over the newest generation alone, for what does not depend on it."""
    yield from extension_over("both")


def extension_over(generation: str) -> Iterator[type]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules_of(generation).items():
            patch.setitem(sys.modules, name, module)
        for name in OURS:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(OURS[1]).HostMemoryRefit
        for name in OURS:
            sys.modules.pop(name, None)
