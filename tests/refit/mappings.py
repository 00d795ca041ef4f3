"""Refits of stored ranks at the level of plans and transports, with buckets of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlrefit.integration.comm.group import Group
from rlrefit.integration.plan import Analysis, analyse, plan_broadcast
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport import GoldenTransport, P2PTransport, Transport
from rlrefit.integration.weights.holdings import Holdings, SpecTable
from rlrefit.integration.weights.manifest import TensorSpec

from .groups import GroupWorld
from .stored import StoredDestination, StoredRank, value_of


class Worlds:
    """A group world of each size, made at its first use."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s
        self._made: dict[int, GroupWorld] = {}

    def of(self, size: int) -> GroupWorld:
        if size not in self._made:
            self._made[size] = GroupWorld(size, self._timeout_s).__enter__()
        return self._made[size]

    def close(self) -> None:
        for world in self._made.values():
            world.__exit__(None, None, None)


class Mapping:
    """Weights that a trainer's ranks store and engine ranks want, with the plans between them."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        sources: Sequence[StoredRank],
        destinations: Sequence[StoredDestination],
        bucket_bytes: int,
        broadcast_bytes: int = 1 << 14,
        verify: str = "full",
    ):
        """Plan between what the ranks of both sides store; buckets of p2p, and of golden.

        Raises:
            PlanError: as :func:`analyse` does.
        """
        self._verify = verify
        self.sources, self.destinations = sources, destinations
        self.ranks: list[StoredRank] = [*sources, *destinations]
        table = SpecTable(specs)
        holdings = [
            Holdings.from_fragments(rank, stored.held_fragments(), stored.refused, table.positions)
            for rank, stored in enumerate(self.ranks)
        ]
        trainers = len(sources)
        self.analysis: Analysis = analyse(
            specs, holdings[:trainers], holdings[trainers:], bucket_bytes=bucket_bytes
        )
        self.broadcasts = plan_broadcast(self.analysis.manifest, holdings[:trainers], broadcast_bytes)

    def transport(self, name: str, rank: int, group: Group) -> Transport:
        if name == "golden":
            return GoldenTransport(
                group, rank, self.broadcasts, self._verify, is_source=rank < len(self.sources)
            )
        return P2PTransport(group, rank, self.analysis.compile(rank), self._verify)

    def load_misc(self, version: int) -> None:
        """What the misc path would bring: each engine's own loader takes it."""
        for destination in self.destinations:
            destination.load_weights(
                (spec.name, value_of(spec, version)) for spec in self.analysis.manifest.specs("misc")
            )


def wrong_refits(
    worlds: Worlds, mapping: Mapping, transports: Sequence[str], versions: Sequence[int]
) -> list[str]:
    """Refit every version over every transport; says what is wrong afterwards."""
    world = worlds.of(len(mapping.ranks))
    found: list[str] = []
    for name in transports:

        def bind(rank: int, group: Group, name: str = name) -> tuple[Transport, object]:
            transport = mapping.transport(name, rank, group)
            transport.bind(mapping.ranks[rank].held_fragments())
            return transport, transport.describe()

        bound = _all_well(world.run(bind))
        described = [said for _, said in bound]

        for transport, _ in bound:
            transport.connect(described)

        def refit(rank: int, group: Group, bound: Any = bound) -> None:
            bound[rank][0].run(StageClock(group.device))

        for version in versions:
            for source in mapping.sources:
                source.hold(version)
            for destination in mapping.destinations:
                destination.poison()
            _all_well(world.run(refit))
            mapping.load_misc(version)
            found += [
                f"{name}, version {version}, rank {rank}: {wrong}"
                for rank, stored in enumerate(mapping.ranks)
                for wrong in stored.wrong(version)
            ]
    return found


def _all_well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
