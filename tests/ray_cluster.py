"""A Ray cluster of this host, whose workers come up in a moment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from tests.vllm_processes import vllm_processes
from tests.warm_python import OF_WORKERS, warm_python

_LONGEST_S = 300.0


# Of a cluster's head, beside what runs actors: for dashboards, for output of workers on the driver's, and for adding hosts.
_NOT_NEEDED = ("start_api_server", "start_log_monitor", "start_monitor")
_AGENT = Path(__file__).with_name("ray_agent.py")


@contextmanager
def patient_ray() -> Iterator[None]:
    """A cluster that starts in the block gets five minutes to come up, where Ray gives half a minute, however busy the machine is.

    It has no processes that serve people alone, and of the one that serves Ray too what does that; each would load Ray's
    Python for seconds.
    """
    get_node, command_of = services.get_node, services._build_python_executable_command_memory_profileable

    def patient(*given: Any) -> Any:
        end = time.monotonic() + _LONGEST_S
        while True:
            try:
                return get_node(*given)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def without_dashboard(component: str, *given: Any, **more: Any) -> list[str]:
        agent = [str(_AGENT)] if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT else []
        return [*command_of(component, *given, **more), *agent]

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(services, "get_node", patient))
        patches.enter_context(mock.patch.object(services, command_of.__name__, without_dashboard))
        for start in _NOT_NEEDED:
            patches.enter_context(mock.patch.object(Node, start))
        yield


@contextmanager
def warm_cluster(loaded: Sequence[str], env: Mapping[str, str], num_cpus: int) -> Iterator[None]:
    """This process drives the cluster until the block ends; its workers have vLLM and the modules ``loaded``.

    Each would load them for ten seconds otherwise. What the modules read of ``env`` as they load, they find.
    """
    with warm_python(vllm_processes, (*OF_WORKERS, *loaded)) as python:
        # Not by a runtime_env: Ray would start a Python for each worker that tells it how to start.
        with (
            patient_ray(),
            mock.patch.object(sys, "executable", str(python)),
            mock.patch.dict(os.environ, env),
        ):
            ray.init(
                num_cpus=num_cpus, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False
            )
        try:
            yield
        finally:
            ray.shutdown()
