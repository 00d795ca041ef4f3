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
    """vLLM takes the processes of its engines from the server; each would load for ten seconds otherwise."""
    with ExitStack() as patches:
        for launcher in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
            patches.enter_context(
                mock.patch.object(import_module(launcher), "get_mp_context", vllm_processes)
            )
        yield
