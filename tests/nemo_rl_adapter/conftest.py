"""What the tests of NeMo-RL share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from rlrefit.workers.frameworks.nemo_rl.contract import CHECKPOINT_ENGINE, SHARD_TO_SHARD
from tests.nemo_rl_adapter import recorded


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recorded interfaces under NeMo-RL's own names."""
    modules: dict[str, ModuleType] = {}
    for published in (CHECKPOINT_ENGINE, *SHARD_TO_SHARD):
        module = modules.setdefault(published.module, ModuleType(published.module))
        setattr(module, published.name, getattr(recorded, published.name))
        monkeypatch.setitem(sys.modules, published.module, module)
    monkeypatch.delitem(sys.modules, "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine", raising=False)
    yield
    # Made on the recorded class.
    sys.modules.pop("rlrefit.workers.frameworks.nemo_rl.checkpoint_engine", None)
