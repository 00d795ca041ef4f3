"""A Ray cluster of this host, whose workers come up in a moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import ray

from tests.vllm_processes import vllm_processes
from tests.warm_python import OF_WORKERS, warm_python


@contextmanager
def warm_cluster(loaded: Sequence[str], env: Mapping[str, str], num_cpus: int) -> Iterator[None]:
    """This process drives the cluster until the block ends; its workers have vLLM and the modules ``loaded``.

    Each would load them for ten seconds otherwise. What the modules read of ``env`` as they load, they find.
    """
    with warm_python(vllm_processes, (*OF_WORKERS, *loaded)) as python:
        # Not by a runtime_env: Ray would start a Python for each worker that tells it how to start.
        with mock.patch.object(sys, "executable", str(python)), mock.patch.dict(os.environ, env):
            ray.init(
                num_cpus=num_cpus, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False
            )
        try:
            yield
        finally:
            ray.shutdown()
