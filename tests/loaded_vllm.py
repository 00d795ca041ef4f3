"""vLLM, ready to use; the server of the tests' processes that hold engines and models of it imports it before it forks."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

import tests.gloo  # noqa: F401
from rlrefit.workers.engines.vllm import patches
from tests import vllm_cpu
from tests.garbage import collect_rarely
from tests.vllm_processes import forked_engines

vllm_cpu.play(vllm_cpu.chosen())

# Ray reads as it loads of which cluster and job a process is, and Ray's workers are forked from here, too. vLLM from 0.26 on loads
# it with its engine, and does without where there is none.
sys.modules["ray"] = None  # type: ignore[assignment]
for _module in (
    "entrypoints.llm",
    "model_executor.layers.fused_moe.layer",
    "model_executor.models.qwen3",
    "model_executor.models.qwen3_moe",
    "v1.engine.async_llm",
    "v1.engine.core",
    "v1.worker.cpu_worker",
):
    import_module(f"vllm.{_module}")
vllm_cpu.multiply_by_int4()
# As in tests.loaded_megatron, but for what changes vLLM as it is loaded (the worker extension).
for _module in (
    "recipes.bench.run",
    "workers.engines.vllm.async_driver",
    "workers.engines.vllm.colocated",
    "workers.engines.vllm.driver",
    "workers.engines.vllm.server",
    "workers.engines.vllm.worker_refit",
):
    import_module(f"rlrefit.{_module}")
del sys.modules["ray"]
# An engine's processes spin for a second after each message, in which nothing else gets their cores.
_messages = import_module("vllm.distributed.device_communicators.shm_broadcast")
_messages.SpinCondition.__init__.__defaults__ = (0.02,)
_wait = _messages.SpinCondition.wait


def _wait_for_a_while(condition: Any, timeout_ms: int | None = None) -> None:
    # What is sent before a reader's subscription has arrived wakes nobody, and a worker would wait for its first call for ever.
    _wait(condition, 500 if timeout_ms is None else min(timeout_ms, 500))


_messages.SpinCondition.wait = _wait_for_a_while
# Each engine would compile its sampler for ten seconds otherwise; all that it computes is eager in the tests.
torch.compiler.set_stance("force_eager")
_of_all_forks = forked_engines()
_of_all_forks.__enter__()  # engines' cores start the workers
# The server is the system's parent of them all, which that watch takes for the end of theirs; the tests' processes
# have a watch of their own.
patches._watching.set()
collect_rarely()
