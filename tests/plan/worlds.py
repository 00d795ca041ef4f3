"""Random layouts of random weights, and a plan run on plain index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.plan import Analysis, Message, Plan
from rlrefit.integration.weights.holdings import HoldingGroup, Holdings
from rlrefit.integration.weights.manifest import TensorSpec

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


@dataclass(frozen=True)
class Layouts:
    """Weights, and what each rank of both sides holds or wants of them by name."""

    specs: list[TensorSpec]
    sources: list[dict[str, list[Box]]]
    destinations: list[dict[str, list[Box]]]

    def holdings(self) -> tuple[list[Holdings], list[Holdings]]:
        sides = [*self.sources, *self.destinations]
        built = [holdings_of(rank, held, self.specs) for rank, held in enumerate(sides)]
        return built[: len(self.sources)], built[len(self.sources) :]


def holdings_of(rank: int, held: dict[str, list[Box]], specs: Sequence[TensorSpec]) -> Holdings:
    """Holdings from boxes by name; each weight is a group of its own, as no fragments exist."""
    groups: dict[Any, list[int]] = {}
    for position, spec in enumerate(specs):
        if held.get(spec.name):
            groups.setdefault((tuple(held[spec.name]), spec.dtype), []).append(position)
    return Holdings(rank, tuple(HoldingGroup(b, d, np.array(i)) for (b, d), i in groups.items()))


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = 5) -> Layouts:
    """Grids of boxes over the trainers with random replicas; engines want any cells of any other grid."""
    train, gen = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_ranks))
    sources: list[dict[str, list[Box]]] = [{} for _ in range(train)]
    destinations: list[dict[str, list[Box]]] = [{} for _ in range(gen)]
    specs: list[TensorSpec] = []
    for kind in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 12), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        cells = draw(_grid(shape))
        owners = [draw(st.sets(st.integers(0, train - 1), min_size=1)) for _ in cells]
        wanted = draw(_grid(shape))
        wants = [draw(st.sets(st.sampled_from(range(len(wanted))))) for _ in range(gen)]
        for copy in range(draw(st.integers(1, 3))):
            name = f"w{kind}.{copy}"
            specs.append(TensorSpec(name, shape, dtype))
            for cell, ranks in zip(cells, owners, strict=True):
                for rank in ranks:
                    sources[rank].setdefault(name, []).append(cell)
            for rank, chosen in enumerate(wants):
                if chosen:
                    destinations[rank][name] = [wanted[i] for i in sorted(chosen)]
    return Layouts(specs, sources, destinations)


@st.composite
def _grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    edges = [
        sorted({0, n} | draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else [0, n] for n in shape
    ]
    return [tuple(cell) for cell in product(*(list(pairwise(e)) for e in edges))]


def plans_of(analysis: Analysis) -> list[Plan]:
    """Every rank's own part."""
    return [analysis.compile(rank) for rank in range(analysis.train_ranks + analysis.gen_ranks)]


def run_plans(plans: Sequence[Plan], world: Layouts) -> list[dict[str, np.ndarray]]:
    """What each engine rank holds after the plans ran: element numbers of each weight, -1 where nothing was
    written. Fails if bytes are written twice, or outside of what was wanted, or are sent by someone who lacks them.

    Messages carry element numbers. Rounds run in their global order, and a relay can only pass on what came before.
    """
    train = len(world.sources)
    shapes = {s.name: s.shape for s in world.specs}
    numbers = {n: np.arange(int(np.prod(s, dtype=np.int64))).reshape(s) for n, s in shapes.items()}
    results = [{n: np.full(s, -1) for n, s in shapes.items()} for _ in world.destinations]
    received: dict[tuple[int, int], set[Any]] = {}
    sent = [m for plan in plans for messages in plan.sends for m in messages]
    for message in sorted(sent, key=lambda m: m.round_index):
        if message.is_relay:
            came = received.get((message.source, message.origin), set())
            assert (message.round_index - 1, message.segments) in came
        for segment in message.segments:
            if not message.is_relay:
                assert any(
                    _inside(segment.box, box) for box in world.sources[message.source][segment.name]
                ), "the sender does not hold what it sends"
            target = results[message.destination - train][segment.name]
            assert any(
                _inside(segment.box, box)
                for box in world.destinations[message.destination - train][segment.name]
            ), "nobody wants it there"
            place = local_slice(box_of(shapes[segment.name]), segment.box)
            assert (target[place] == -1).all(), "written twice"
            target[place] = numbers[segment.name][place]
        received.setdefault((message.destination, message.source), set()).add(
            (message.round_index, message.segments)
        )
    return results


def both_ends_agree(plans: Sequence[Plan]) -> bool:
    """Whether every message stands in its sender's and in its receiver's plan, and nowhere else."""
    sent: list[Message] = [m for plan in plans for messages in plan.sends for m in messages]
    got: list[Message] = [m for plan in plans for messages in plan.receives for m in messages]
    owned = all(
        (m.source if side is plan.sends else m.destination) == plan.rank
        for plan in plans
        for side in (plan.sends, plan.receives)
        for messages in side
        for m in messages
    )
    return owned and sorted(sent, key=_key) == sorted(got, key=_key)


def _key(m: Message) -> tuple[int, int, int, int]:
    return m.round_index, m.source, m.destination, m.origin


def _inside(inner: Box, outer: Box) -> bool:
    return all(a <= x and y <= b for (x, y), (a, b) in zip(inner, outer, strict=True))
