"""Worlds of ``p2p`` transports without a session: ranks are threads over gloo, or processes over NCCL."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.plan import NCCL_PACE, Pace, Plan, analyse
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport import P2PTransport, TransferResult
from rlrefit.integration.weights.holdings import Holdings, HoldingsReader, SpecTable
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, held_by


@dataclass(frozen=True)
class Setting:
    """How a world's weights travel."""

    bucket_bytes: int = 1 << 20
    lanes: int = 1
    verify: str = "full"
    fan_out: bool | None = False
    timeout_s: float = 20.0
    pace: Pace = NCCL_PACE


@dataclass
class Rank:
    """One rank of a world."""

    rank: int
    endpoint: Any
    plan: Plan
    group: Group
    transport: P2PTransport
    exchange: Callable[[Any], list[Any]]

    def bind(self) -> None:
        """What the engine does with all ranks at once: bind, tell each other, connect."""
        self.transport.bind(self.endpoint.fragments(self.endpoint.all_specs)[0])
        self.transport.connect(self.exchange(self.transport.describe()))

    def refit(self, version: int) -> tuple[TransferResult, list[str]]:
        """Change the trainer's weights or poison the engine's, run, and say what is wrong."""
        is_source = isinstance(self.endpoint, SyntheticSource)
        if is_source:
            self.endpoint.set_version(version)
        else:
            self.endpoint.poison()
        result = self.transport.run(StageClock(self.endpoint.device))
        return result, [] if is_source else self.endpoint.wrong(version)


def contiguous(endpoint: Any) -> Any:
    """The same endpoint with storage without gaps."""
    held = held_by(endpoint)
    held.update({key: view.contiguous() for key, view in held.items()})
    return endpoint


def open_rank(
    rank: int,
    specs: Sequence[TensorSpec],
    endpoint: SyntheticSource | SyntheticDestination,
    sides: tuple[int, int],
    store: Store,
    setting: Setting,
) -> Rank:
    """Plan and connect one rank; all ranks at the same time. ``sides``: ranks of trainer and engine."""
    size = sum(sides)
    calls = 0

    def exchange(data: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        store.set(f"exchange/{calls}/{rank}", json.dumps(data))
        store.wait([f"exchange/{calls}/{r}" for r in range(size)], timedelta(seconds=60))
        return [json.loads(store.get(f"exchange/{calls}/{r}")) for r in range(size)]

    endpoint.all_specs = list(specs)  # type: ignore[union-attr]
    if isinstance(endpoint, SyntheticSource):
        endpoint.fragments = lambda specs, call=endpoint.fragments: call()  # type: ignore[method-assign, misc]
    table = SpecTable(specs)
    fragments, refused = endpoint.fragments(specs)  # type: ignore[call-arg]
    ours = Holdings.from_fragments(rank, fragments, refused, table.positions)
    read = HoldingsReader(table)
    everyone = [read.holdings(rank, parts) for rank, parts in enumerate(exchange(ours.to_parts()))]
    held, wanted = everyone[: sides[0]], everyone[sides[0] :]
    how: Any = {"bucket_bytes": setting.bucket_bytes, "fan_out": setting.fan_out, "pace": setting.pace}
    plan = analyse(specs, held, wanted, **how).compile(rank)
    device = endpoint.device
    group = TorchGroup.open(
        store, "bulk", rank, size, device, setting.timeout_s, lambda stage: None, setting.lanes
    )
    transport = P2PTransport(group, rank, plan, setting.verify)
    opened = Rank(rank, endpoint, plan, group, transport, exchange)
    opened.bind()
    return opened


def run_threads(
    specs: Sequence[TensorSpec],
    sources: Sequence[SyntheticSource],
    destinations: Sequence[SyntheticDestination],
    body: Callable[[Rank], Any],
    setting: Setting,
) -> list[Any]:
    """Open all ranks, each in a thread, and return what ``body`` returns, or the exception that ended the rank."""
    endpoints = [*sources, *destinations]
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            opened = open_rank(
                rank, specs, endpoints[rank], (len(sources), len(destinations)), store, setting
            )
            try:
                return body(opened)
            finally:
                opened.transport.close()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return list(pool.map(run, range(len(endpoints))))


def run_well(*args: Any) -> list[Any]:
    """The same, but a failure of any rank is raised."""
    results = run_threads(*args)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
