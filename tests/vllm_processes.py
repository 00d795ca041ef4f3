"""Processes with vLLM loaded; the server of a session with a module that imports this one starts at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.context import ForkServerContext
from unittest import mock

from tests.servers import vllm_context


def vllm_processes() -> ForkServerContext:
    """As :func:`tests.servers.processes`, with vLLM in place of Megatron, and the environment of who starts them."""
    return vllm_context()


@contextmanager
def forked_engines() -> Iterator[None]:
    """vLLM takes the processes of its engines from the server; each would load for ten seconds otherwise.

    It looks at a model's class here, where it would start a Python for each whose traits its cache lacks, lest CUDA be
    initialized: each would load vLLM too, one for every rank on a new machine.
    """
    with ExitStack() as patches:
        for launcher in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
            patches.enter_context(
                mock.patch.object(import_module(launcher), "get_mp_context", vllm_processes)
            )
        registry = import_module("vllm.model_executor.models.registry")
        patches.enter_context(mock.patch.object(registry, "_run_in_subprocess", lambda look: look()))
        yield
