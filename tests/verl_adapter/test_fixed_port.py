"""A rendezvous at a port that is fixed, as a firewall wants it, over updates of verl's engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

from rlrefit.workers.frameworks.verl import full_tensors
from rlrefit.workers.frameworks.verl.engine import ShardCheckpointEngine
from rlrefit.workers.frameworks.verl.full_tensors import NcclXferCheckpointEngine
from tests.spawn import free_port


@pytest.fixture(autouse=True)
def this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    async def no_actor_here() -> None:
        pass

    monkeypatch.setattr(full_tensors, "meet_own_actor", no_actor_here)


def places_of(engines: Sequence[Any]) -> list[dict[str, Any]]:
    """What verl's manager hands to each: the first one is an actor's."""
    reports = [engine.prepare() for engine in engines]
    given = type(engines[0]).build_topology(1, len(engines) - 1, reports)
    return [{key: part[key][i] for key in part} for part in given for i in range(len(part["rank"]))]


def update(engines: list[NcclXferCheckpointEngine], version: int) -> list[torch.Tensor]:
    """An update by one actor and rollout workers, each in a thread of its own; what the latter got."""

    async def send() -> None:
        await engines[0].send_weights(iter([("w", torch.full((3,), float(version)))]), version)

    async def receive(engine: NcclXferCheckpointEngine) -> torch.Tensor:
        got = [tensor.clone() async for _, tensor in engine.receive_weights(version)]
        return torch.cat(got)

    with ThreadPoolExecutor(len(engines)) as pool:
        joined = [
            pool.submit(engine.init_process_group, **place)
            for engine, place in zip(engines, places_of(engines), strict=True)
        ]
        for future in joined:
            future.result()
        sent = pool.submit(lambda: asyncio.run(send()))
        got = list(pool.map(lambda engine: asyncio.run(receive(engine)), engines[1:]))
        sent.result()
    for engine in engines:
        engine.finalize()
    return got


def test_full_tensors_meet_at_a_fixed_port_in_each_update_and_with_an_added_replica() -> None:
    port = free_port()
    engines = [NcclXferCheckpointEngine(1 << 20, is_master=not i, port=port, timeout_s=20) for i in range(3)]
    for version, count in ((1, 2), (2, 2), (3, 3), (4, 2)):
        got = update(engines[:count], version)
        assert [tensor.tolist() for tensor in got] == [[version] * 3] * (count - 1)
    for engine in engines:
        engine._leave()


def test_shards_meet_at_a_fixed_port_in_each_update_and_with_an_added_replica() -> None:
    port = free_port()
    engines = [ShardCheckpointEngine(1 << 20, is_master=not i, port=port) for i in range(3)]
    epochs = []
    for count in (2, 2, 3):
        places = places_of(engines[:count])
        for engine, place in zip(engines, places, strict=False):
            engine.init_process_group(**place)
        socket.create_connection(("127.0.0.1", port), 5).close()  # somebody serves there
        epochs.append(places[0]["meeting"]["epoch"])
        assert places[0]["meeting"]["port"] == port
    assert epochs == [1, 2, 3]
    engines[0]._leave()
