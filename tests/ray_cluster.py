"""A Ray cluster of this host, whose workers come up in a moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray

from tests.vllm_processes import vllm_processes
from tests.warm_python import OF_WORKERS, warm_python


@contextmanager
def warm_cluster(loaded: Sequence[str], env: Mapping[str, str], num_cpus: int) -> Iterator[None]:
    """This process drives the cluster until the block ends; its workers have vLLM and the modules ``loaded``.

    Each would load them for ten seconds otherwise. What the modules read of ``env`` as they load, they find.
    """
    with warm_python(vllm_processes, (*OF_WORKERS, *loaded)) as python:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=128 << 20,
            log_to_driver=False,
            runtime_env={"py_executable": str(python), "env_vars": dict(env)},
        )
        try:
            yield
        finally:
            ray.shutdown()
