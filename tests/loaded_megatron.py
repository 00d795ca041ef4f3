"""Megatron with its stand-ins for CPUs, ready to use; the server of the tests' processes imports it before it forks.

Attributes:
    FACTORIES, METHODS: of torch, before the stand-ins came.
    ANNOUNCED: what the stand-ins have logged since.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module

import torch

import tests.gloo  # noqa: F401
from rlrefit.workers.trainers.megatron import cpu_standins
from tests.garbage import collect_rarely

FACTORIES, METHODS = (torch.zeros, torch.tensor), (torch.Tensor.type, torch.Tensor.cuda)
ANNOUNCED: list[str] = []


class _Ear(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        ANNOUNCED.append(record.getMessage())


# Bridge looks for it at every parameter, which takes a fifth of the time where it is not installed. What it looks for is named too:
# else Python would ask for each package that it would be in.
for _name in ("modelopt", "modelopt.torch.opt.dynamic"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
logging.getLogger(cpu_standins.__name__).addHandler(_Ear())
_load_from_bytes = torch.storage._load_from_bytes
cpu_standins.ensure_megatron()
# Megatron puts a function of its own here, by whose name tensors are pickled: who reads an answer would have to load it.
torch.storage._load_from_bytes = _load_from_bytes
# Some of Bridge's activations would be compiled on each rank for seconds, and compute the same.
torch.compiler.set_stance("force_eager")
# What ranks use of the package, and of it what needs no Ray: each would load it for a third of a second.
for _module in (
    "recipes.bench.run",
    "recipes.policy.fsdp",
    "recipes.policy.make",
    "recipes.policy.megatron",
    "workers.engines.transformers.engine",
    "workers.trainers.fsdp.mixin",
    "workers.trainers.megatron.mixin",
    "workers.trainers.megatron.model",
    "workers.trainers.qat.mixin",
):
    import_module(f"rlrefit.{_module}")
collect_rarely()
