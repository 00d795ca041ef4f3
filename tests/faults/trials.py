"""What a seed stands for: a list of trials, each with one fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from .moments import Place

# Trainer and generation ranks.
World = tuple[int, int]
WORLDS: tuple[World, ...] = ((2, 2), (2, 1), (3, 2), (1, 2))
# The versions of an epoch's refits, and the one that the next epoch heals to.
VERSIONS = (1, 2, 3)
HEALED = 11

# A rank that dies or raises is noticed at once: its limit only has to be longer than a busy machine is slow.
PATIENT_S = 8.0
# A rank that is silent is noticed when the limit is over.
SHORT_S = 3.0


class Kind(StrEnum):
    """Kinds of faults; the rows of the table."""

    KILLED = "killed"
    FROZEN = "frozen beyond the limit"
    PAUSED = "frozen within the limit"
    INTERRUPTED = "interrupted at a step"
    TWICE = "interrupted twice"
    SIGNALLED = "interrupted by SIGINT"
    RAISED = "endpoint raised"
    DTYPE = "dtype changed"
    STRIDES = "strides changed"
    SHAPE = "shape changed"
    FLIPPED = "bytes changed, verify full"
    FLIPPED_SAMPLED = "bytes changed, verify sampled"
    LOST = "control messages lost"
    DELAYED = "control messages late"
    DRIPPED = "control messages a byte at a time"
    CUT = "control connection cut"
    # Of sparse refits.
    BROKEN = "raised at a step"
    LOST_BLOCKS = "blocks lost"
    DOUBLED = "blocks doubled"
    REORDERED = "blocks reordered"
    ENTRIES = "entries of blocks damaged"
    BLOCK_DATA = "data of blocks damaged"
    HEADERS = "headers of blocks damaged"
    BASE = "base changed"
    AHEAD = "base ahead of its sum"
    UNRECORDED = "step not recorded"
    WRITTEN = "engine written where blocks land"
    UNSEEN = "engine written where none lands"
    DIRTY = "engine dirty between refits"
    MOVED = "engine's weights moved and spoiled"
    RESTARTED = "engine anew, says it is no older"


CHANGES = {Kind.DTYPE: "dtype", Kind.STRIDES: "strides", Kind.SHAPE: "shape"}
FLIPS = frozenset({Kind.FLIPPED, Kind.FLIPPED_SAMPLED})
NETWORK = frozenset({Kind.LOST, Kind.DELAYED, Kind.DRIPPED, Kind.CUT})
INTERRUPTS = frozenset({Kind.INTERRUPTED, Kind.TWICE, Kind.SIGNALLED})
# Of blocks between two ranks, and what a sparse refit relies on.
ON_THE_WIRE = frozenset(
    {Kind.LOST_BLOCKS, Kind.DOUBLED, Kind.REORDERED, Kind.ENTRIES, Kind.BLOCK_DATA, Kind.HEADERS}
)
BASES = frozenset({Kind.BASE, Kind.AHEAD})
BEHIND = frozenset({Kind.WRITTEN, Kind.UNSEEN})
# After these the next refit has to be dense.
UNSURE = frozenset({Kind.DIRTY, Kind.MOVED})
# A part of their trials keeps masks of what steps have changed, and no bases.
MAY_MASK = ON_THE_WIRE | BEHIND | UNSURE | FLIPS | {Kind.RESTARTED}
# No sum is made anew of what no block is about (docs/delta.md).
NOT_LOOKED_AT = frozenset({Kind.AHEAD, Kind.UNSEEN})
# Faults that hit a point of the library's code on the victim.
STEPPED = (
    frozenset({Kind.KILLED, Kind.FROZEN, Kind.PAUSED, Kind.INTERRUPTED, Kind.TWICE, Kind.BROKEN}) | NETWORK
)
# Faults that nobody notices before a limit is over.
SILENT = frozenset({Kind.FROZEN, Kind.PAUSED, Kind.LOST, Kind.DELAYED, Kind.DRIPPED})

# How often kinds come in a round; all others once.
_SHARES = {Kind.INTERRUPTED: 7, Kind.KILLED: 4, Kind.RAISED: 4} | dict.fromkeys(
    (Kind.TWICE, Kind.SIGNALLED, Kind.FROZEN, Kind.DTYPE, Kind.FLIPPED_SAMPLED), 2
)
_OF_DELTAS = frozenset({Kind.BROKEN, Kind.RESTARTED, Kind.UNRECORDED}) | ON_THE_WIRE | BASES | BEHIND | UNSURE
ROUND = tuple(kind for kind in Kind if kind not in _OF_DELTAS for _ in range(_SHARES.get(kind, 1)))
# Of sparse refits. What they have in common with dense ones is hit where they are themselves.
_DELTA_SHARES = dict.fromkeys(_OF_DELTAS, 2) | {
    Kind.KILLED: 4,
    Kind.INTERRUPTED: 5,
    Kind.BROKEN: 5,
    Kind.RAISED: 3,
    **dict.fromkeys((Kind.ENTRIES, Kind.HEADERS, Kind.BASE, Kind.WRITTEN), 3),
    **dict.fromkeys((Kind.FROZEN, Kind.TWICE, Kind.FLIPPED_SAMPLED), 2),
    **dict.fromkeys((Kind.PAUSED, Kind.SIGNALLED, Kind.CUT, Kind.LOST), 1),
}
DELTA_ROUND = tuple(kind for kind in Kind for _ in range(_DELTA_SHARES.get(kind, 0)))

# Windows that are hit more often than others.
_WEIGHTS = {"transfer": 3, "connect": 2, "begin": 2, "commit": 2}
_WEIGHTS |= dict.fromkeys(("base", "pack", "header", "blocks", "apply", "sums"), 3)
_TRAINER_METHODS = ("make", "specs", "fragments", "prepare", "export", "storage_key", "before")
_ENGINE_METHODS = ("make", "fragments", "load_weights", "finish", "storage_key", "before")
_ERRORS = ("ValueError", "RuntimeError", "OutOfMemoryError", "MemoryError", "SystemExit", "CancelledError")


@dataclass(frozen=True)
class Trial:
    """One fault in one epoch."""

    number: int
    seed: str  # of this trial alone, for what is chosen on the victim
    kind: Kind
    world: World
    victim: int
    verify: str
    timeout_s: float
    place: Place  # that the fault hits; a window of "" is any moment of the part
    fraction: float  # of the points of the place, or of its time, that have passed by then
    method: str = ""  # of the endpoint that raises
    error: str = ""
    way: float = 0.0  # the share of the limit for which something is held up; how far a second interrupt is
    slow: int = -1  # a rank that is slow in that part, so that the others wait
    delta: bool = False  # the refits after the first are sparse
    sleeps: bool = False  # the engines say that they give their memory back between refits
    masks: bool = False  # of what steps have changed, in place of bases

    @property
    def size(self) -> int:
        """Ranks of both sides."""
        return sum(self.world)


def healing(trial: Trial) -> tuple[int, ...]:
    """The versions of the epoch after the fault; of sparse refits the one after the first, too."""
    return (HEALED, HEALED + 1) if trial.delta else (HEALED,)


# Points that a rank of a world passes in each place, as a refit without faults counted them.
Counts = Mapping[World, Sequence[Mapping[Place, int]]]


def draw(seed: int, count: int, counts: Counts, *, delta: bool = False) -> list[Trial]:
    """The trials of a seed; every kind of dense or of sparse refits comes in each ``ROUND`` or ``DELTA_ROUND`` of them."""
    kinds: list[Kind] = []
    while len(kinds) < count:
        following = list(DELTA_ROUND if delta else ROUND)
        Random(f"{seed}/order/{len(kinds)}").shuffle(following)
        kinds += following
    drawn = _draw_delta if delta else _draw
    return [drawn(seed, number, kind, counts) for number, kind in enumerate(kinds[:count])]


def _draw_delta(seed: int, number: int, kind: Kind, counts: Counts) -> Trial:
    trial = _draw(seed, number, kind, counts)
    rng = Random(f"{trial.seed}/delta")
    (train, gen), victim, place = trial.world, trial.victim, trial.place
    if kind in BASES | {Kind.UNRECORDED}:
        victim = rng.randrange(train)
    elif kind is Kind.HEADERS or kind in BEHIND | UNSURE or kind is Kind.RESTARTED:
        victim = train + rng.randrange(gen)
    if kind in STEPPED:
        # The dense refit that leaves a base, and the sparse ones.
        part = rng.choice((1, 2, 2, 2, 3, 3))
        places = sorted(place for place in counts[trial.world][victim] if place[0] == part)
        place = rng.choices(places, [_WEIGHTS.get(window, 1) for _, window in places])[0]
    elif kind in _OF_DELTAS:
        place = rng.choice((2, 3)), ""
    elif kind in FLIPS:
        place = 1, ""
    elif kind in (Kind.SIGNALLED, Kind.RAISED) and place[0] > 0:
        place = 2, ""
    error = rng.choice(("ValueError", "RuntimeError", "MemoryError")) if kind is Kind.BROKEN else trial.error
    sleeps = rng.random() < 0.3
    masks = kind is Kind.UNRECORDED or (kind in MAY_MASK and rng.random() < 0.4)
    return replace(trial, delta=True, sleeps=sleeps, masks=masks, victim=victim, place=place, error=error)


def _draw(seed: int, number: int, kind: Kind, counts: Counts) -> Trial:
    own = f"{seed}/{number}"
    rng = Random(own)
    world = rng.choice(WORLDS)
    victim = rng.randrange(sum(world))
    verify = rng.choice(("sampled", "full"))
    if kind in FLIPS:
        verify = "full" if kind is Kind.FLIPPED else "sampled"
    place: Place = (rng.randint(1, 2), "")
    method = error = ""
    way, slow = 0.0, -1
    if kind in STEPPED:
        part = rng.choice((0, 1, 2))
        places = sorted(place for place in counts[world][victim] if place[0] == part)
        place = rng.choices(places, [_WEIGHTS.get(window, 1) for _, window in places])[0]
    elif kind is Kind.SIGNALLED:
        place = (rng.choice((0, 1, 2)), "")
        slow = rng.choice([-1, *(rank for rank in range(sum(world)) if rank != victim)])
    elif kind is Kind.RAISED:
        method = rng.choice(_TRAINER_METHODS if victim < world[0] else _ENGINE_METHODS)
        error = rng.choice(_ERRORS)
        if method in ("make", "specs"):
            place = (0, "")
        elif method in ("fragments", "storage_key"):
            place = (rng.choice((0, 1, 2)), "")
    elif kind in CHANGES:
        place = (rng.choice((1, 2, 2, 3)), "")
    if kind is Kind.PAUSED:
        way = rng.uniform(0.1, 0.4)
    elif kind is Kind.TWICE:
        way = rng.random()
    elif kind is Kind.DELAYED:
        way = rng.choice((rng.uniform(0.1, 0.4), rng.uniform(1.5, 2.5)))
    limit = SHORT_S if kind in SILENT else PATIENT_S
    return Trial(
        number, own, kind, world, victim, verify, limit, place, rng.random(), method, error, way, slow
    )
