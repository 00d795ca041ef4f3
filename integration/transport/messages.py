"""A rank's messages as it handles them: what relays pass on, when each is checked, and which need no bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanError, RefitMismatch
from ..packing import Strided
from ..plan import Message, Plan
from .storage import LiveView, LiveViews


@dataclass(frozen=True, eq=False)
class LocalMessage:
    """A message as this rank handles it.

    Attributes:
        message: as planned.
        index: of the rank's own round.
        relay_of: of a relay, the received message whose bytes it passes on.
    """

    message: Message
    index: int
    relay_of: LocalMessage | None = None


class LocalMessages:
    """All messages of one rank.

    Attributes:
        sends: by the rank's own rounds.
        receives: the same.
        outgoing: what is sent, by peer.
        incoming: what is received, by peer.
        turns: (k, n) of each: of the n messages of its pair it is the k-th, in the turns of sampled checks.
        readers: for each round the later rounds that pass on what it received.
        peers: ranks that this one exchanges messages with.
    """

    def __init__(self, plan: Plan):
        """
        Raises:
            PlanError: a relay of what this rank has not received before.
        """
        self.rank = plan.rank
        self.receives = [[LocalMessage(m, i) for m in messages] for i, messages in enumerate(plan.receives)]
        arrived: dict[tuple[int, int, str], list[LocalMessage]] = defaultdict(list)
        for messages in self.receives:
            for one in messages:
                if not one.message.is_relay:
                    arrived[_key(one.message)].append(one)
        self.sends = [
            [LocalMessage(m, i, self._relayed(m, i, arrived) if m.is_relay else None) for m in messages]
            for i, messages in enumerate(plan.sends)
        ]
        self.outgoing = _by_peer(self.sends, lambda m: m.destination)
        self.incoming = _by_peer(self.receives, lambda m: m.source)
        self.peers = sorted({*self.outgoing, *self.incoming})
        self.readers: list[list[int]] = [[] for _ in self.receives]
        for messages in self.sends:
            for one in messages:
                if one.relay_of is not None and one.index not in self.readers[one.relay_of.index]:
                    self.readers[one.relay_of.index].append(one.index)
        # A relay carries the checksum of the message that it repeats, and so has that one's turn.
        self.turns: dict[LocalMessage, tuple[int, int]] = {}
        for pairs in (self.outgoing, self.incoming):
            for messages in pairs.values():
                own = [one for one in messages if not one.message.is_relay]
                self.turns |= {one: (k, len(own)) for k, one in enumerate(own)}
        self.turns |= {
            one: self.turns[one.relay_of]
            for messages in self.sends
            for one in messages
            if one.relay_of is not None
        }

    def describe(self) -> dict[str, Any]:
        """Plain data for the peers: the turns of relays."""
        return {
            "turns": {
                str(peer): turns
                for peer, messages in self.outgoing.items()
                if (turns := [self.turns[one] for one in messages if one.message.is_relay])
            },
        }

    def learn_turns(self, described: Sequence[Any]) -> None:
        """Learn relays' turns.

        Args:
            described: what every rank's :meth:`describe` gave, in the order of ranks.

        Raises:
            RefitMismatch: a peer's data is malformed or does not fit this rank's plan.
        """
        for peer, messages in self.incoming.items():
            relays = [one for one in messages if one.message.is_relay]
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

    def direct(self, views: LiveViews) -> set[LocalMessage]:
        """Bare messages that travel straight from or to this rank's storage, which is contiguous there."""
        return {
            one
            for messages in (*self.sends, *self.receives)
            for one in messages
            if one.message.is_bare and _is_direct(views.of(one.message.segments[0]), views)
        }

    def _relayed(
        self, message: Message, index: int, arrived: Mapping[tuple[int, int, str], list[LocalMessage]]
    ) -> LocalMessage:
        for one in arrived.get(_key(message), ()):
            if one.index < index and one.message.segments == message.segments:
                return one
        raise PlanError(
            f"round {message.round_index} passes on a message from refit rank {message.origin} to "
            f"{message.destination} that did not arrive before",
            stage="bind",
            rank=self.rank,
            parameter=message.segments[0].name,
        )


def _is_direct(live: LiveView, views: LiveViews) -> bool:
    # The wire of a GPU does not read host memory.
    return isinstance(live, torch.Tensor) and views.on_device(live) and Strided.of(live).contiguous


def _key(message: Message) -> tuple[int, int, str]:
    return message.origin, message.nbytes, message.segments[0].name


def _by_peer(rounds: Sequence[Sequence[LocalMessage]], peer: Any) -> dict[int, list[LocalMessage]]:
    found: dict[int, list[LocalMessage]] = defaultdict(list)
    for messages in rounds:
        for one in messages:
            found[peer(one.message)].append(one)
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
