"""Memory of a process and of its GPU, now and at its peak; and the record of a memory stage.

Through torch's allocator a process sees its own part of a GPU alone. Pools that map memory themselves (vLLM's sleep mode)
count as reserved there even while they sleep. The device's memory as a whole is what runs out, so it is sampled too.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_KIB = 1024


@dataclass(frozen=True)
class ProcessMemory:
    """One process and the device it works on, in bytes.

    Attributes:
        process: its name for users, such as ``trainer rank 0``.
        device: UUID of the GPU, or ``cpu``.
        allocated: by torch's allocator; on a CPU the process's resident memory.
        reserved: the same, with the allocator's cache; on a CPU the resident memory.
        peak_allocated: the largest since the last restart.
        peak_reserved: the same of ``reserved``.
        device_used: on the device by all processes; on a CPU, on the host.
        device_peak: the largest sample of it since the last restart.
        device_total: the size of the device's memory.
    """

    process: str
    device: str
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    device_used: int
    device_peak: int
    device_total: int


@dataclass(frozen=True)
class StageRecord:
    """The record of one move of a colocated cycle.

    Attributes:
        cycle: number of refits before it.
        move: the move.
        stage: the stage after it.
        seconds: wall time.
        processes: memory of all processes at its end, with the peaks since its beginning.
        version: of the weights, of a refit; else None.
        failed: its error; empty if it succeeded.
    """

    cycle: int
    move: str
    stage: str
    seconds: float
    processes: tuple[ProcessMemory, ...]
    version: int | None = None
    failed: str = ""

    @property
    def device_peak(self) -> int:
        """The most bytes that were in use on one device, by all processes together."""
        return max((process.device_peak for process in self.processes), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON lines."""
        return asdict(self) | {"device_peak": self.device_peak}


def write_records(path: Path) -> Callable[[StageRecord], None]:
    """A function that appends a record to a file of JSON lines."""

    def write(record: StageRecord) -> None:
        with path.open("a") as file:
            file.write(json.dumps(record.to_json()) + "\n")

    return write


class MemoryWatch:
    """Follows the memory of this process and its device.

    On a GPU the peaks of the process are torch's own and exact. The peak of the device is the largest of samples, one every
    ``interval_s`` seconds and one at each end. Little can come and go between two samples, since an allocator keeps its
    memory until it is told to give it back.

    Args:
        device: of the process's work.
        interval_s: seconds between samples; 0 samples at the ends alone.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.02) -> None:
        self._device = device
        self._interval = interval_s
        self._cuda = device.type == "cuda"
        self._name = str(torch.cuda.get_device_properties(device).uuid) if self._cuda else "cpu"
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._peak_used = self._peak_resident = 0

    def restart(self) -> None:
        """Count the peaks from now on, and sample the device until :meth:`read` is called."""
        self.close()
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_used = self._peak_resident = 0
        self._look()
        if self._interval > 0:
            self._stop = threading.Event()
            self._watcher = threading.Thread(
                target=self._watch, args=(self._stop,), name="memory-watch", daemon=True
            )
            self._watcher.start()

    def read(self, process: str) -> ProcessMemory:
        """The memory now and the peaks; ends the sampling."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self.close()
        used, resident = self._look()
        allocated = reserved = resident
        peak_allocated = peak_reserved = self._peak_resident
        if self._cuda:
            allocated = torch.cuda.memory_allocated(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            peak_allocated = torch.cuda.max_memory_allocated(self._device)
            peak_reserved = torch.cuda.max_memory_reserved(self._device)
        return ProcessMemory(
            process,
            self._name,
            allocated,
            reserved,
            peak_allocated,
            peak_reserved,
            used,
            self._peak_used,
            self._of_device()[1],
        )

    def close(self) -> None:
        """End the sampling; safe to call twice."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval):
            self._look()

    def _look(self) -> tuple[int, int]:
        used = self._of_device()[0]
        resident = 0 if self._cuda else _resident()
        with self._lock:
            self._peak_used = max(self._peak_used, used)
            self._peak_resident = max(self._peak_resident, resident)
        return used, resident

    def _of_device(self) -> tuple[int, int]:
        """Bytes in use, and bytes in total."""
        if self._cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free, total
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * _KIB for line in lines}
        return found["MemTotal"] - found["MemAvailable"], found["MemTotal"]


def empty_cache(device: torch.device) -> None:
    """Give back what this process's allocator caches; a no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
