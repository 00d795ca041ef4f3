"""What is seen of a process and its device between two marks."""

from __future__ import annotations

import threading
import time

import torch

from rlrefit.integration.colocated.memory import MemoryWatch

SIZE = 96 << 20


def test_memory_that_comes_and_goes_between_two_marks_is_seen() -> None:
    watch = MemoryWatch(torch.device("cpu"), interval_s=0.005)
    watch.restart()
    held = torch.ones(SIZE, dtype=torch.uint8)
    time.sleep(0.3)
    del held
    found = watch.read("trainer rank 0")
    assert (found.process, found.device) == ("trainer rank 0", "cpu")
    assert found.peak_reserved - found.reserved > SIZE // 2
    assert found.device_peak >= found.device_used > 0
    assert found.device_total > found.device_peak
    watch.restart()
    again = watch.read("trainer rank 0")
    assert again.peak_reserved - again.reserved < SIZE // 2
    assert not [thread for thread in threading.enumerate() if thread.name == "memory-watch"]
