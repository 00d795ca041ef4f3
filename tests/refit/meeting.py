"""Channels of all ranks of a world, each in a thread of the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlrefit.integration.control import RendezvousServer
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.control.world import RefitWorld


def join(server: RendezvousServer, rank: int, timeout_s: float = 5.0) -> Channel:
    meeting = server.rendezvous
    return Channel(meeting, RefitWorld(rank, meeting.train_ranks, meeting.gen_ranks), timeout_s)


def on_all_ranks(
    server: RendezvousServer, body: Callable[[int, Channel], Any], timeout_s: float = 5.0
) -> list[Any]:
    """What ``body(rank, channel)`` returns on each rank, or the exception that ended it."""

    def run(rank: int) -> Any:
        try:
            channel = join(server, rank, timeout_s)
            try:
                return body(rank, channel)
            finally:
                channel.close()
        except Exception as error:
            return error

    with ThreadPoolExecutor(server.rendezvous.size) as pool:
        return list(pool.map(run, range(server.rendezvous.size)))
