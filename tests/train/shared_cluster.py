"""A Ray cluster that works of these modules join, one after another, so that not each of them has to start one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from unittest import mock

import ray

from rlrefit.recipes.config.schema import RayConfig
from rlrefit.recipes.run.cluster import ray_cluster
from tests.ray_cluster import patient_ray
from tests.spawn import PATIENT_S, processes, run_alone
from tests.warm_python import warm_python

RANKS = 4


def on_shared_cluster[Found](
    drive: Callable[..., Found],
    folder: Path,
    *rest: object,
    timeout_s: float = PATIENT_S,
    draws: bool = False,
) -> Found:
    """What ``drive(folder, ray_address, *rest)`` returns, with a place on the cluster for each of :data:`RANKS` ranks.

    It has a process of its own: a run takes signals in its main thread, and Ray knows one cluster in a process.

    Args:
        draws: whether runs draw their pictures, which takes each most of a second.
    """
    found: Found = run_alone(
        _drive, drive, draws, folder, _address(), *rest, environment={"COLUMNS": "200"}, timeout_s=timeout_s
    )
    return found


def _drive[Found](drive: Callable[..., Found], draws: bool, *given: object) -> Found:
    picture = nullcontext() if draws else mock.patch("rlrefit.recipes.train.write_report")
    with picture:
        return drive(*given)


@cache
def _address() -> str:
    """Of the cluster, which ends with this process."""
    ours, theirs = processes().Pipe()
    holder = processes().Process(target=_hold, args=(theirs,))
    holder.start()
    theirs.close()
    # Before this process waits for its children.
    Finalize(None, _end, (ours, holder), exitpriority=0)
    assert ours.poll(400), "no Ray cluster within 400 s"
    address: str = ours.recv()
    return address


def _hold(pipe: Connection) -> None:
    # Ray's workers run by the Python of who starts the cluster.
    with (
        warm_python() as python,
        mock.patch.object(sys, "executable", str(python)),
        # Of a cluster that the machine is part of, which is nothing to a run that starts its own.
        mock.patch.dict(os.environ, {"RAY_ADDRESS": "127.0.0.1:1"}),
        patient_ray(),
        ray_cluster(RayConfig(), RANKS),
    ):
        pipe.send(ray.get_runtime_context().gcs_address)
        pipe.poll(None)  # until the other end is closed, or its process ends


def _end(pipe: Connection, holder: ForkServerProcess) -> None:
    pipe.close()
    holder.join(60)
    assert holder.exitcode == 0
