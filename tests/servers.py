"""Servers that fork the tests' processes, with what their start would otherwise spend most of its time on loaded.

There are two, started when they are first asked: one with Megatron and transformers, and one with vLLM. All that descends
from the session asks the same two, where multiprocessing would start a server of its own in each process that wants children.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import threading
from multiprocessing import forkserver, popen_forkserver, reduction
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar

_PRELOADED = [
    "tests.without_gpus",
    "pytest",  # the module that each process takes for the main one
    "tests.servers",
    "torch.distributed.tensor",
    "torch._inductor.compile_fx",
    "torchvision",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    # Of policies and engines with adapters.
    "peft",
    # Of each run of a recipe, which must load Ray itself.
    "matplotlib.pyplot",
    "rlrefit.recipes.config.load",
    "tests.loaded_megatron",  # the last: it takes what is loaded out of the collector's sight
]
_PRELOADED_WITH_VLLM = ["tests.without_gpus", "pytest", "tests.servers", "tests.loaded_vllm"]


class _Server(forkserver.ForkServer):
    """One that the session starts, and its descendants find running."""

    def ensure_running(self) -> None:
        inherited = self._forkserver_pid is None and self._forkserver_alive_fd is not None
        if not inherited:
            super().ensure_running()

    def connect_to_new_process(self, fds: list[int]) -> tuple[int, int]:
        asked = _SERVERS[getattr(_chosen, "name", MEGATRON)]
        return super(_Server, asked).connect_to_new_process(fds)


MEGATRON, VLLM = "megatron", "vllm"
_chosen = threading.local()
# Multiprocessing's own, which the code under test may ask too, and another one.
forkserver._forkserver.__class__ = _Server
forkserver.connect_to_new_process = forkserver._forkserver.connect_to_new_process
_SERVERS: dict[str, _Server] = {MEGATRON: forkserver._forkserver, VLLM: _Server()}


class Process(ForkServerProcess):
    """Ends with the process that started it, is no nicer than that, and knows the servers.

    Attributes:
        watches_parent: whether a thread of its own sees to its end; one that forks has no threads, and sees to it itself.
    """

    server: ClassVar[str] = MEGATRON
    watches_parent = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._niceness = os.nice(0)
        self._servers: dict[str, tuple[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        running = {
            name: (server._forkserver_address, reduction.DupFd(server._forkserver_alive_fd))
            for name, server in _SERVERS.items()
            if server._forkserver_alive_fd is not None
        }
        return self.__dict__ | {"_servers": running}

    @classmethod
    def _Popen(cls, process: Any) -> popen_forkserver.Popen:
        _chosen.name = process.server
        try:
            return popen_forkserver.Popen(process)
        finally:
            del _chosen.name

    def run(self) -> None:
        for name, (address, alive) in self._servers.items():
            server = _SERVERS[name]
            server._forkserver_address, server._forkserver_alive_fd = address, alive.detach()
        os.nice(self._niceness - os.nice(0))
        if self.watches_parent:
            threading.Thread(target=_end_with, args=(self.ends_with(),), daemon=True).start()
        super().run()

    def ends_with(self) -> list[int]:
        """Files at whose end this process is killed."""
        parent = mp.parent_process()
        assert parent is not None
        return [parent.sentinel]


class _Spawned(Process):
    """Has the environment of the process that started it, as a spawned one."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_environment": dict(os.environ)}

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class _VllmProcess(_Spawned):
    server = VLLM

    def run(self) -> None:
        try:
            super().run()
        finally:
            # What vLLM's library would do as its process exits, for which a fork has no time.
            for line in Path("/proc/self/maps").read_text().splitlines():
                if found := re.search(r"/dev/shm/.*-cpushm_\d+$", line):
                    Path(found[0]).unlink(missing_ok=True)


class _OwnVllm(_VllmProcess):
    """Starts a server with vLLM of its own, which finds this process's environment as it loads."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_servers"][VLLM]
        return state


def _end_with(files: list[int]) -> None:
    wait(files)
    os.kill(os.getpid(), signal.SIGKILL)


def processes(made: type[Process] = Process) -> ForkServerContext:
    """Makes processes without GPUs that come up in a moment, each as if it were started anew.

    The first call starts the server, which loads while the caller goes on.
    """
    server = _SERVERS[made.server]
    # The code under test may have set others.
    server.set_forkserver_preload(_PRELOADED_WITH_VLLM if made.server == VLLM else _PRELOADED)
    server.ensure_running()
    context = ForkServerContext()
    context.Process = made
    return context


def spawn_context() -> ForkServerContext:
    """As :func:`processes`, with the environment of who starts them, as the code under test expects of spawned ones."""
    return processes(_Spawned)


def vllm_context() -> ForkServerContext:
    """As :func:`spawn_context`, with vLLM in place of Megatron."""
    return processes(_VllmProcess)


def own_vllm_context() -> ForkServerContext:
    """As :func:`vllm_context`, of processes whose own ones come from another server, which loads by their environment."""
    return processes(_OwnVllm)
