"""vLLM's processes end with the process that started them, also where that one had no time to say so.

vLLM's own watch goes one way: a worker ends with its engine core. An engine core whose driver was killed lives on, and
its workers with it, in GPU memory that nobody can use any more. A signal on the parent's death (``PR_SET_PDEATHSIG``)
comes already when the *thread* that started the process ends, so the parents are looked at instead.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

# Names that vLLM's launcher gives its processes. An engine inside of its driver's process has neither.
_CORE, _WORKER = "EngineCore", "VllmWorker"
_started = threading.Event()


def end_with_parents(every_s: float = 1.0) -> None:
    """Watch, from a worker's process, the engine core and the driver; once per process.

    Does nothing in processes that vLLM's launcher did not start: Ray ends its own actors, and a script decides for itself.
    """
    parent = multiprocessing.parent_process()
    name = multiprocessing.current_process().name
    if parent is None or parent.pid is None or not name.startswith((_CORE, _WORKER)) or _started.is_set():
        return
    _started.set()
    core = parent.pid
    driver = _parent_of(core) if name.startswith(_WORKER) else None

    def watch() -> None:
        while os.getppid() == core:
            if driver is not None and _parent_of(core) not in (driver, None):
                _end(core, f"the driver (process {driver}) has ended: the engine core ends")
            time.sleep(every_s)
        _end(os.getpid(), f"process {core}, which started this one, has ended")

    threading.Thread(target=watch, name="rlrefit parents", daemon=True).start()


def _end(process: int, reason: str) -> None:
    logger.error("%s", reason)
    # Nothing less: an orphan may hang in a collective, where no handler runs.
    os.kill(process, signal.SIGKILL)


def _parent_of(process: int) -> int | None:
    """The parent of ``process``; None if that has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(status.rpartition(")")[2].split()[1])
