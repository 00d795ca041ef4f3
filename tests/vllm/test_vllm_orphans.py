"""Processes named and started as vLLM's launcher does it, whose driver ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import multiprocessing, os, sys, time
from rlrefit.workers.engines.vllm.patches import end_with_parents

def worker():
    end_with_parents(every_s=0.05)
    end_with_parents(every_s=0.05)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

def core(name):
    context = multiprocessing.get_context("fork")
    context.Process(target=worker, name=name).start()
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    context.Process(target=core, args=(sys.argv[2],), name=sys.argv[1]).start()
    sys.stdin.readline()
    os._exit(1)
"""


def _running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _left_after_the_drivers_end(core: str, worker: str, within_s: float) -> set[int]:
    command = [sys.executable, "-c", SCRIPT, core, worker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        started = {int(driver.stdout.readline()) for _ in range(2)}
        time.sleep(0.3)
        assert all(map(_running, started))
        driver.stdin.write("end\n")
        driver.stdin.flush()
        driver.wait(10)
    until = time.monotonic() + within_s
    while any(map(_running, started)) and time.monotonic() < until:
        time.sleep(0.02)
    left = set(filter(_running, started))
    for process in left:
        os.kill(process, 9)
    return left


def test_an_engine_core_and_its_workers_end_with_their_driver():
    assert _left_after_the_drivers_end("EngineCore_DP0", "VllmWorker-0", 10.0) == set()


def test_processes_that_vllm_did_not_start_are_left_alone():
    assert len(_left_after_the_drivers_end("Process-1", "Process-2", 0.5)) == 2
