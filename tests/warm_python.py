"""A Python for command lines that others run, such as Ray's for its workers: in place of each, a warm process is forked.

``tests/servers.py`` does so for processes that the tests start themselves.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

from tests.servers import processes
from tests.warm_launcher import serve

# Of any worker of Ray's, with what it loads to pass objects on.
OF_WORKERS = (
    "ray._private.node",
    "ray.actor",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
    "pyarrow.json",
    "pydantic.v1.fields",
    "starlette.datastructures",
    "torch.utils.serialization",
)
# Of those that are the recipes' ranks, and of those that are vLLM's engines.
RANKS = (
    *OF_WORKERS,
    "torch.distributed.checkpoint._fsspec_filesystem",
    "rlrefit.recipes.policy.group",
    "rlrefit.recipes.rollout.transformers",
    "rlrefit.workers.engines.transformers.engine",
)
ENGINE = (*OF_WORKERS, "rlrefit.recipes.rollout.vllm", "rlrefit.workers.engines.vllm.driver")


@contextmanager
def warm_python(
    made_by: Callable[[], ForkServerContext] = processes, loaded: Sequence[str] = RANKS
) -> Iterator[Path]:
    """Path of a program that runs the command line of the recipes, Ray's workers, and the engine of a live benchmark, as
    Python would.

    The processes have no GPUs, and end with the block at the latest. Their environment is that of the command; libraries but
    Ray have read the server's as they were loaded. A worker whose variable ``WARM_PYTHON`` is the path of the ``socket``
    beside another such program, is that one's.

    Args:
        made_by: of :mod:`tests.servers`, what forks the process that the others are forked from.
        loaded: modules for the workers beside those of its server.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm_python_"))  # short: a socket's path has little room
    launcher = folder / "python"
    launcher.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path[:] = {sys.path!r}\n"
        "from tests.warm_launcher import launch\nlaunch()\n"
    )
    launcher.chmod(0o700)
    context = made_by()
    goes_on, ours = context.Pipe(duplex=False)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        server = context.Process(target=serve, args=(listener, goes_on, loaded))
        server.watches_parent = False  # type: ignore[attr-defined]  # but the pipe's end
        server.start()
    goes_on.close()
    try:
        yield launcher
    finally:
        ours.close()
        server.join(60)
        assert server.exitcode == 0, "processes outlive the program"
        shutil.rmtree(folder)


def forks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The process that runs in a launcher's place, if it is one."""
    label, _, pid = launcher.name().partition(" ")
    return [psutil.Process(int(pid))] if label == "for" and psutil.pid_exists(int(pid)) else []
