"""The order in which GPU ranks fill and empty each other's buckets, run by threads that stand for hardware queues.

What the driver does with the calls, a GPU test shows; here is whether any order of progress brings all bytes, and ends.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from contextlib import nullcontext
from queue import Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.comm import device_group
from rlrefit.integration.comm.device_group import LANE_WORD_BYTES, DeviceExchange, DeviceGroup, DeviceLink
from rlrefit.integration.comm.group import PeerBuffer
from rlrefit.integration.errors import RefitTimeout

BUCKET = 64
RANKS = 3


class Queues:
    """A thread for each stream, which does its calls one after another."""

    def __init__(self, streams: int, seed: int):
        self._random = random.Random(seed)
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(streams)]
        self.threads = [threading.Thread(target=self._run, args=(q,), daemon=True) for q in self._queues]
        for thread in self.threads:
            thread.start()

    def call(self, function: str, *args: Any) -> None:
        stream = args[0] if function.startswith("cuStream") else args[-1]
        self._queues[stream].put((function, args))

    def finish(self, within_s: float) -> bool:
        """Whether all came to their end in time."""
        for queue in self._queues:
            queue.put(None)
        deadline = time.monotonic() + within_s
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _run(self, queue: SimpleQueue[Any]) -> None:
        while (item := queue.get()) is not None:
            function, args = item
            if self._random.random() < 0.05:
                time.sleep(0.001)
            if function == "cuMemcpyAsync":
                ctypes.memmove(args[0], args[1], args[2])
                continue
            word = ctypes.c_int64.from_address(args[1])
            if function == "cuStreamWriteValue64":
                word.value = args[2]
            else:
                while word.value < args[2]:
                    time.sleep(1e-5)


class Wired:
    """Links between all pairs of ranks, over plain memory."""

    def __init__(self, lanes: int):
        self.kept: list[torch.Tensor] = []
        self.groups: list[Any] = []
        links: list[dict[int, list[DeviceLink]]] = [{} for _ in range(RANKS)]
        for a in range(RANKS):
            for b in range(a + 1, RANKS):
                for _ in range(lanes):
                    words = torch.zeros(LANE_WORD_BYTES, dtype=torch.uint8)
                    up, down = (torch.zeros(2 * BUCKET, dtype=torch.uint8) for _ in range(2))
                    self.kept += [words, up, down]
                    at, to_b, to_a = words.data_ptr(), up.data_ptr(), down.data_ptr()
                    links[a].setdefault(b, []).append(DeviceLink(words, at, True, to_b, to_a, BUCKET))
                    links[b].setdefault(a, []).append(DeviceLink(words, at, False, to_a, to_b, BUCKET))
        for rank in range(RANKS):
            mine = links[rank]
            self.groups.append(
                SimpleNamespace(rank=rank, link=lambda peer, lane, mine=mine: mine[peer][lane])
            )


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[Queues]:
    made: list[Queues] = []

    def call(function: str, *args: Any) -> None:
        made[-1].call(function, *args)

    monkeypatch.setattr(device_group, "call", call)
    return made


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shared_queue", [False, True])
def test_all_bytes_arrive_however_the_queues_come_on_and_how_few_they_are(
    queues: list[Queues], seed: int, shared_queue: bool
) -> None:
    chance, lanes, rounds, refits = random.Random(seed), 2, 12, 3
    wired = Wired(lanes)
    queues.append(Queues(RANKS * lanes, seed))
    prepared: list[tuple[int, DeviceExchange]] = []
    checked: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(rounds):
        # (sender, receiver) → sizes of the parcels, some of them larger than a bucket and some empty.
        sizes = {
            (a, b): [chance.choice([0, 1, 63, 64, 65, 500]) for _ in range(chance.randrange(3))]
            for a in range(RANKS)
            for b in range(RANKS)
            if a != b
        }
        out = {pair: [torch.zeros(n, dtype=torch.uint8) for n in ns] for pair, ns in sizes.items()}
        into = {pair: [torch.full((n,), 0xFF, dtype=torch.uint8) for n in ns] for pair, ns in sizes.items()}
        checked += [ends for pair in sizes for ends in zip(out[pair], into[pair], strict=True)]
        for rank in range(RANKS):
            sends = [
                PeerBuffer(b, buffer) for (a, b), buffers in out.items() if a == rank for buffer in buffers
            ]
            receives = [
                PeerBuffer(a, buffer) for (a, b), buffers in into.items() if b == rank for buffer in buffers
            ]
            lane = number % lanes
            exchange = DeviceExchange(wired.groups[rank], lane, sends, receives, BUCKET)
            prepared.append((rank * lanes + (0 if shared_queue else lane), exchange))
    # No byte changes between the refits of this test, as their ends are not waited for.
    for source, _ in checked:
        source.random_(0, 255)
    for _ in range(refits):
        for stream, exchange in prepared:
            for portion in exchange.portions:
                exchange.enqueue(portion, stream)
    assert queues[0].finish(20.0)
    assert all(torch.equal(source, target) for source, target in checked)


def test_a_rank_that_gives_up_ends_the_waits_of_its_own_streams(queues: list[Queues]) -> None:
    wired = Wired(1)
    queues.append(Queues(1, 0))
    out, into = (torch.zeros(5 * BUCKET, dtype=torch.uint8) for _ in range(2))
    exchange = DeviceExchange(wired.groups[0], 0, [PeerBuffer(1, out)], [PeerBuffer(2, into)], BUCKET)
    for portion in exchange.portions:
        exchange.enqueue(portion, 0)
    assert not queues[0].finish(0.2)
    for peer in (1, 2):
        wired.groups[0].link(peer, 0).release()
    assert queues[0].finish(5.0)


def test_a_large_exchange_does_not_wait_for_a_dead_peer_in_a_full_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver's call waits without a limit where its queue is full; the host's own waits have one."""
    wired = Wired(1)
    full: Queue[Any] = Queue(1024)
    monkeypatch.setattr(device_group, "call", lambda *args: full.put(args))
    monkeypatch.setattr(device_group, "on_device", lambda device: nullcontext())
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    # None has happened, since the peer does not come.
    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    class Group(SimpleNamespace):
        make_room, began, follow = DeviceGroup.make_room, DeviceGroup.began, DeviceGroup.follow

        def wait_for(self, events: Any, stage: str) -> None:
            raise RefitTimeout("late", stage=stage)

    group = Group(
        device=torch.device("cpu"),
        rank=0,
        connect=lambda peers: None,
        link=wired.groups[0].link,
        _under_way=deque(),
        _last={},
    )
    large = torch.zeros(1000 * BUCKET, dtype=torch.uint8)
    exchange = DeviceExchange(group, 0, [PeerBuffer(1, large)], [], BUCKET)
    ended: list[BaseException] = []

    def start() -> None:
        try:
            exchange.start("misc")
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(10.0)
    assert [type(error) for error in ended] == [RefitTimeout]
    # All that was enqueued is waited for before the group gives its memory back.
    assert len(group._under_way) > 0
    assert full.qsize() <= sum(calls for _, calls in group._under_way) <= device_group._MOST_CALLS
