"""What a module of tests needs of the host, said in one place, so that a run on any host tells what it left out and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

import pytest
import torch


def needs(*packages: str, gpus: int = 1, capability: tuple[int, int] = (0, 0)) -> list[pytest.MarkDecorator]:
    """Marks for a module: a test of GPUs, left out with all that the host lacks as its reason.

    Args:
        packages: that its processes import; they may lie on ENGINE_PATH, the PYTHONPATH of engines whose packages are in
            folders of their own.
        gpus: how many.
        capability: of the first one, at least.
    """
    lacking = _lacking(packages, gpus, capability)
    reason = f"this host lacks {', '.join(lacking)}"
    return [pytest.mark.gpu, pytest.mark.skipif(bool(lacking), reason=reason)]


def _lacking(packages: Sequence[str], gpus: int, capability: tuple[int, int]) -> list[str]:
    here = torch.cuda.device_count()
    found = []
    if here < gpus:
        found.append(f"{gpus} CUDA device{'s' * (gpus > 1)} ({here} here)")
    elif torch.cuda.get_device_capability() < capability:
        found.append(f"compute capability {capability[0]}.{capability[1]}")
    path = [*sys.path, *os.environ.get("ENGINE_PATH", "").split(os.pathsep)]
    return found + [name for name in packages if PathFinder.find_spec(name, path) is None]
