"""What the whole suite shares."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests import vllm_cpu
from tests.ahead import FoundAhead
from tests.garbage import collect_rarely
from tests.limits import Limits

# Until all modules are there: what they make as they load stays.
gc.disable()
# Read as torch and Ray load, here and in what tests start.
os.environ.update(
    {
        # Threads wait for one another by spinning, which takes many times what they compute where others want the cores.
        "OMP_NUM_THREADS": "1",
        # torch's flight recorder adds each new group to a map before it takes its lock (FlightRecorderDetail.hpp, record), which
        # has crashed where ranks are threads of one process.
        "TORCH_FR_BUFFER_SIZE": "0",
        # As for clusters that a run starts, so that runs that join one ask for its token too.
        "RAY_AUTH_MODE": "token",
        # Not behind all others on the machine, where Ray puts its workers: runs would starve on a busy one.
        "RAY_worker_niceness": "0",
        # ray.init waits for the processes that Ray starts ahead, and for ever if one of them ends before it has registered, as
        # where it can't connect to Ray's store on a busy machine.
        "RAY_prestart_worker_first_driver": "0",
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-cpu",
        choices=list(vllm_cpu.CPUS),
        default=vllm_cpu.PLAIN,
        help="the CPU that vLLM takes the machine for (tests/vllm_cpu.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Limits())
    # Inherited by all that tests start: no thread that wakes takes the core of one that runs. Else the thread that reads gloo's sockets
    # takes it from a thread that holds one of them, and looks again and again: a quarter of the time of ranks on few cores. Sandboxes
    # and some builds of Python know no such policy.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    cpu = config.getoption("--vllm-cpu")
    os.environ[vllm_cpu.VARIABLE] = cpu
    # Others are played in processes of their own.
    vllm_cpu.show(cpu if vllm_cpu.is_here(cpu) else vllm_cpu.PLAIN)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Servers of the tests' processes load beside the rest of the collection, if tests that start processes of theirs are collected.

    In this hook: what their processes write is captured only if they start while pytest captures.
    """
    if metafunc.config.option.collectonly:
        return
    for name in ("tests.spawn.processes", "tests.vllm_processes.vllm_processes"):
        module, _, starts = name.rpartition(".")
        if module in sys.modules:
            getattr(sys.modules[module], starts)()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last come the modules whose work is done ahead, so that they find it done."""
    items.sort(key=_is_done_ahead)
    for item in filter(_is_done_ahead, items):
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))  # whatever is done before it


def pytest_collection_finish() -> None:
    """All modules are there for good: a million objects that the collector need not walk through again and again."""
    collect_rarely()


def _is_done_ahead(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, "AHEAD")


@pytest.fixture(scope="session", autouse=True)
def found_ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FoundAhead]:
    """What the modules of all tests that were collected want to have begun as early as can be."""
    modules: dict[ModuleType, bool] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function):
            full = item.get_closest_marker("full") is not None
            modules[item.module] = modules.get(item.module, False) or full
    found = FoundAhead(modules, tmp_path_factory.mktemp("ahead"))
    yield found
    found.close()
