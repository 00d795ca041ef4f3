"""A Ray cluster that runs in the test's own process join, so that not each of them has to start one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import ray

from rlrefit.recipes.cluster import ray_cluster
from rlrefit.recipes.config_schema import RayConfig
from tests.spawn import processes
from tests.warm_python import warm_python

RANKS = 4


def _hold(pipe: Connection) -> None:
    # Ray's workers run by the Python of who starts the cluster.
    with (
        warm_python() as python,
        mock.patch.object(sys, "executable", str(python)),
        ray_cluster(RayConfig(), RANKS),
    ):
        pipe.send(ray.get_runtime_context().gcs_address)
        pipe.poll(None)  # until the fixture ends, or its process does


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """``ray.address`` of a cluster of this machine with a place for each of :data:`RANKS` ranks."""
    ours, theirs = processes().Pipe()
    holder = processes().Process(target=_hold, args=(theirs,))
    holder.start()
    theirs.close()
    assert ours.poll(120), "no Ray cluster within 120 s"
    yield ours.recv()
    ours.close()
    holder.join(60)
    assert holder.exitcode == 0
