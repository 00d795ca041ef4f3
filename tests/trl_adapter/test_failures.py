"""A part of an update that fails on one rank, or at the server alone: all ranks hear of it, and none waits for another."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitTimeout
from rlrefit.workers.frameworks.trl.transfer import ShardOptions, ShardTransfer
from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

# What fails in a part, by who it is, and what each rank then raises: its type, its ``stage`` and whom it blames.
LATE, DIRTY = RefitTimeout("late", stage="transfer"), EngineDirty("dirty", stage="generate")
# A worker of the server, refit rank 2, was killed: what this rank hears at the rendezvous, and what the server then answers. And a
# server that does nothing, so that the rendezvous ends.
LOST, SILENT = PeerLost("lost", stage="commit", blamed=2), RefitError("500", stage="http")
ENDED = PeerLost("ended", stage="commit", blamed=0)
CASES: dict[str, tuple[dict[Any, BaseException], list[tuple[type, str, int]]]] = {
    "another rank": ({1: ValueError("disk full")}, [(RefitError, "", 1), (ValueError, "", -1)]),
    "an interrupted rank": (
        {1: KeyboardInterrupt()},
        [(RefitError, "", 1), (KeyboardInterrupt, "", -1)],
    ),
    "the main process": ({0: LATE}, [(RefitTimeout, "transfer", -1), (RefitError, "transfer", 0)]),
    "the interrupted main process": (
        {0: KeyboardInterrupt()},
        [(KeyboardInterrupt, "", -1), (RefitError, "", 0)],
    ),
    "the server": ({"server": DIRTY}, [(EngineDirty, "generate", -1)] * 2),
    "the server and another rank": (
        {"server": DIRTY, 1: LATE},
        [(EngineDirty, "generate", -1), (RefitTimeout, "transfer", -1)],
    ),
    "a worker, heard of at the rendezvous first": (
        {0: LOST, "server": SILENT},
        [(PeerLost, "commit", 2), (RefitError, "commit", 2)],
    ),
    "a worker, heard of from the server first": (
        {"server": SILENT, 0: LOST},
        [(PeerLost, "commit", 2), (RefitError, "commit", 2)],
    ),
    "a server that does nothing": ({"server": SILENT, 0: ENDED}, [(RefitError, "http", -1)] * 2),
    "the order": ({"order": ConnectionError("none")}, [(ConnectionError, "", -1), (RefitError, "", 0)]),
}


def update(transfer: ShardTransfer, rank: int, failing: dict[Any, BaseException]) -> int:
    """An order and a part of an update; the rank that its own part gave. What fails on one rank does so in turn."""
    first_fails = threading.Event()

    def part(who: Any) -> dict[str, Any]:
        if who not in failing:
            return {"rank": who}
        if who == next(iter(failing)):
            first_fails.set()
        elif {0, "server"} <= failing.keys():
            assert first_fails.wait(20)
            time.sleep(0.2)  # until it is noted
        raise failing[who]

    transfer._client = SimpleNamespace() if rank == 0 else None  # type: ignore[assignment]
    transfer._from_main(lambda: part("order"))
    done = transfer._with_server(lambda: part(rank), lambda _: part("server"))
    return int(done["rank"])


def fail(rank: int) -> tuple[dict[str, Any], int]:
    """For each case what this rank raised, after how many seconds, and whether the server would be told of the end."""
    transfer = ShardTransfer(SimpleNamespace(accelerator=Accelerator(cpu=True)), ShardOptions())
    found = {}
    for name, (failing, _) in CASES.items():
        begun = time.monotonic()
        with pytest.raises(BaseException) as raised:
            update(transfer, rank, failing)
        error = raised.value
        place = (getattr(error, "stage", ""), getattr(error, "blamed", -1))
        found[name] = ((type(error), *place), time.monotonic() - begun, transfer._client is not None)
    return found, update(transfer, rank, {})


def test_what_fails_alone_ends_the_update_on_all_ranks_with_an_error_that_tells_where():
    ranks = run_ranks(fail, 2, timeout_s=60.0, made_by=vllm_processes)
    for name, (failing, expected) in CASES.items():
        assert [found[name][0] for found, _ in ranks] == expected, name
        assert max(found[name][1] for found, _ in ranks) < 20, name
        # Unless its own part or the server's has failed, the main process still tells the server that it is over.
        assert ranks[0][0][name][2] == (failing.keys() <= {1, "order"}), name
    assert [done for _, done in ranks] == [0, 1]
