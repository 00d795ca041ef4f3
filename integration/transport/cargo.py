"""What one rank ships: its plan's messages with the turns of their checks, and what goes without staging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanError, RefitMismatch
from ..packing import Strided
from ..plan import Message, Plan
from .views import Held, LiveViews


@dataclass(frozen=True, eq=False)
class Item:
    """A message as this rank handles it.

    Attributes:
        message: as planned.
        place: index of the rank's own round.
        relays: the received item whose bytes a relay passes on.
    """

    message: Message
    place: int
    relays: Item | None = None


class Cargo:
    """All messages of one rank.

    Attributes:
        sends: items by the rank's own rounds.
        receives: the same.
        readers: for each round the later rounds that pass on what it received.
        peers: ranks that this one exchanges messages with.
    """

    def __init__(self, plan: Plan):
        """
        Raises:
            PlanError: a relay of what this rank has not received before.
        """
        self.rank = plan.rank
        self.receives = [[Item(m, i) for m in messages] for i, messages in enumerate(plan.receives)]
        arrived: dict[tuple[int, int, str], list[Item]] = defaultdict(list)
        for items in self.receives:
            for item in items:
                if not item.message.is_relay:
                    arrived[_key(item.message)].append(item)
        self.sends = [
            [Item(m, i, self._relayed(m, i, arrived) if m.is_relay else None) for m in messages]
            for i, messages in enumerate(plan.sends)
        ]
        self.outgoing = _by_peer(self.sends, lambda m: m.destination)
        self.incoming = _by_peer(self.receives, lambda m: m.source)
        self.peers = sorted({*self.outgoing, *self.incoming})
        self.readers: list[list[int]] = [[] for _ in self.receives]
        for items in self.sends:
            for item in items:
                if item.relays is not None and item.place not in self.readers[item.relays.place]:
                    self.readers[item.relays.place].append(item.place)
        # For each item (k, n): of the n messages of its pair it is the k-th, in the turns of sampled checks.
        # A relay carries the checksum of the message that it repeats, and so has that one's turn.
        self.turns: dict[Item, tuple[int, int]] = {}
        for pairs in (self.outgoing, self.incoming):
            for items in pairs.values():
                own = [item for item in items if not item.message.is_relay]
                self.turns |= {item: (k, len(own)) for k, item in enumerate(own)}
        self.turns |= {
            item: self.turns[item.relays] for items in self.sends for item in items if item.relays is not None
        }

    def describe(self) -> dict[str, Any]:
        """Plain data for the peers: the turns of relays."""
        return {
            "turns": {
                str(peer): turns
                for peer, items in self.outgoing.items()
                if (turns := [self.turns[item] for item in items if item.message.is_relay])
            },
        }

    def learn_turns(self, described: Sequence[Any]) -> None:
        """Learn relays' turns.

        Args:
            described: what every rank's :meth:`describe` gave, in the order of ranks.

        Raises:
            RefitMismatch: a peer's data is malformed or does not fit this rank's plan.
        """
        for peer, items in self.incoming.items():
            relays = [item for item in items if item.message.is_relay]
            if relays:
                turns = _read_turns(described, peer, self.rank)
                if len(turns) != len(relays):
                    raise RefitMismatch(
                        f"refit rank {peer} passes on {len(turns)} messages, {len(relays)} are planned. Do both run the "
                        "same rlrefit?",
                        stage="connect",
                        rank=self.rank,
                    )
                self.turns |= dict(zip(relays, turns, strict=True))

    def direct(self, views: LiveViews) -> set[Item]:
        """Bare messages that travel straight from or to this rank's storage, which is contiguous there."""
        return {
            item
            for items in (*self.sends, *self.receives)
            for item in items
            if item.message.is_bare and _travels_alone(views.of(item.message.segments[0]), views)
        }

    def _relayed(
        self, message: Message, place: int, arrived: Mapping[tuple[int, int, str], list[Item]]
    ) -> Item:
        for item in arrived.get(_key(message), ()):
            if item.place < place and item.message.segments == message.segments:
                return item
        raise PlanError(
            f"round {message.round_index} passes on a message from refit rank {message.origin} to "
            f"{message.destination} that did not arrive before",
            stage="bind",
            rank=self.rank,
            parameter=message.segments[0].name,
        )


def _travels_alone(live: Held, views: LiveViews) -> bool:
    # The wire of a GPU does not read host memory.
    return isinstance(live, torch.Tensor) and views.at_home(live) and Strided.of(live).contiguous


def _key(message: Message) -> tuple[int, int, str]:
    return message.origin, message.nbytes, message.segments[0].name


def _by_peer(rounds: Sequence[Sequence[Item]], peer: Any) -> dict[int, list[Item]]:
    found: dict[int, list[Item]] = defaultdict(list)
    for items in rounds:
        for item in items:
            found[peer(item.message)].append(item)
    return dict(found)


def _of(kind: type, value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


def _turns(value: object) -> list[tuple[int, int]]:
    """(k, n) of relays: the k-th of n messages, in their order."""
    found = []
    for pair in _of(list, value):
        k, n = (_of(int, number) for number in pair)
        if not 0 <= k < n:
            raise ValueError(f"a message is number {k} of {n}")
        found.append((k, n))
    return found


def _read_turns(described: Sequence[Any], peer: int, rank: int) -> list[tuple[int, int]]:
    try:
        return _turns(described[peer]["turns"].get(str(rank), []))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise RefitMismatch(
            f"what refit rank {peer} says of what it passes on is malformed ({error}); nothing was written. Do both run the "
            "same rlrefit?",
            stage="connect",
            rank=rank,
        ) from error
