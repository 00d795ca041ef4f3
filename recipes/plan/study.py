"""The dry run itself: what all ranks compute, some ranks' own parts, and what it takes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ...integration.errors import PlanError
from ...integration.plan import Analysis, LinkLoad, analyse
from ...integration.weights.holdings import Holdings
from ...integration.weights.manifest import Route, TensorSpec
from .catalog import all_holdings, exported_specs
from .options import PlanOptions, PlanProblems
from .sparse import Sparse, base_bytes, predict


@dataclass(frozen=True)
class RouteRow:
    """Weights of one route that take it for the same reason; bytes are full (global) ones."""

    route: Route
    reason: str
    weights: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """What one rank's own part of the plan amounts to.

    Attributes:
        rank: of the refit world.
        seconds: of a CPU, for the analysis that all ranks do and for this part; others of a busy machine do not count.
        messages: sent and received.
        segments: sent and received.
        staging_bytes: the most of one round in one direction.
        rounds: in which the rank takes part.
        base: size of an element → bytes of what a trainer rank keeps to compare with, in sparse refits.
    """

    rank: int
    seconds: float
    messages: int
    segments: int
    staging_bytes: int
    rounds: int
    base: dict[int, int]


@dataclass(frozen=True)
class Study:
    """A refit that was planned and not carried out.

    Attributes:
        options: what was planned.
        specs: what travels.
        sources: what each trainer rank holds.
        destinations: what each engine rank wants.
        analysis: what every rank computes alike.
        parts: of the measured ranks.
        peak_rss_bytes: the most memory of this process, which held the holdings of all ranks.
    """

    options: PlanOptions
    specs: list[TensorSpec]
    sources: list[Holdings]
    destinations: list[Holdings]
    analysis: Analysis
    parts: tuple[Part, ...]
    peak_rss_bytes: int

    @property
    def slowest_part(self) -> Part:
        """The measured rank that took longest."""
        return max(self.parts, key=lambda part: part.seconds)

    @property
    def misc_bytes(self) -> int:
        """Bytes of the weights that go whole to every engine rank."""
        return self.analysis.manifest.bytes_of("misc")

    @property
    def misc_seconds(self) -> float:
        """The least that the misc path takes: an engine rank's link must carry all of it once.

        The path runs after the shards, so its time comes on top of theirs.
        """
        topology = self.analysis.topology
        trainer_0, engines = np.array(0), np.arange(self.analysis.train_ranks, len(topology.host_of))
        slowest = int(topology.ways(trainer_0, engines).min())
        return self.misc_bytes / float(topology.gb_per_s[slowest]) / 1e9

    @property
    def predicted_seconds(self) -> float:
        """Of the whole refit: shard to shard as predicted, and the least of the misc path."""
        return self.analysis.predicted_seconds + self.misc_seconds

    @property
    def bound_seconds(self) -> float:
        """The least that the shards need on some link, whoever sends, and the least of the misc path."""
        return self.analysis.bound_seconds + self.misc_seconds

    @property
    def staging_bytes(self) -> int:
        """What ``p2p`` stages at most for each direction on a rank: two buckets for each stream.

        With fan-out a stream gets another one where a bucket is still to be passed on.
        """
        return 2 * self.options.streams * self.analysis.bucket_bytes

    @property
    def round_bytes(self) -> int:
        """What a round of ``p2p`` fills of the staging memory, at most over the measured ranks."""
        return max(part.staging_bytes for part in self.parts)

    @property
    def sparse(self) -> Sparse | None:
        """Sparse refits of the same plan; None if none was asked for."""
        options = self.options
        if not options.changed:
            return None
        return predict(
            self.analysis,
            options.hosts,
            max((part.base for part in self.parts), key=lambda base: sum(base.values())),
            changed=options.changed,
            delta_base=options.delta_base,
            bucket_bytes=options.bucket_bytes,
            quantized=options.quantize == "fp8",
            misc=(self.misc_bytes, self.misc_seconds),
        )

    @property
    def bytes_by_rank(self) -> dict[str, dict[int, int]]:
        """By rank of the refit, what trainers send, engines receive and, with fan-out, engines pass on."""
        pairs, train = self.analysis.pair_bytes, self.analysis.train_ranks
        sent, received = pairs.sum(axis=1).tolist(), pairs.sum(axis=0).tolist()
        found = {
            "trainers send": dict(enumerate(sent[:train])),
            "engines receive": dict(enumerate(received[train:], start=train)),
        }
        if self.analysis.fan_out:
            found["engines pass on"] = dict(enumerate(sent[train:], start=train))
        return found

    @property
    def links(self) -> list[LinkLoad]:
        """The links that carry something, the busiest first."""
        return sorted(self.analysis.links, key=lambda link: -link.seconds)

    @property
    def bulk_share(self) -> float:
        """Of the bytes that an engine takes at all, those that go shard to shard."""
        bulk = self.analysis.manifest.bytes_of("bulk")
        taken = bulk + self.misc_bytes
        return bulk / taken if taken else 1.0

    def routes(self) -> list[RouteRow]:
        """All routes and reasons, the largest first within a route."""
        found: dict[tuple[Route, str], list[int]] = defaultdict(list)
        for entry in self.analysis.manifest:
            found[entry.route, entry.reason].append(entry.spec.nbytes)
        rows = [RouteRow(route, reason, len(sizes), sum(sizes)) for (route, reason), sizes in found.items()]
        order: dict[Route, int] = {"bulk": 0, "misc": 1, "unused": 2}
        return sorted(rows, key=lambda row: (order[row.route], -row.nbytes, row.reason))

    def as_json(self, train: str, gen: str) -> dict[str, object]:
        """The keys that ``--json`` prints; ``train`` and ``gen`` as the user wrote them."""
        misc = {row.reason: row.nbytes for row in self.routes() if row.route == "misc"}
        return {
            "model": self.options.model.name,
            "train": train,
            "gen": gen,
            "quantize": self.options.quantize,
            "bulk_share": self.bulk_share,
            "bytes": {"bulk": self.analysis.manifest.bytes_of("bulk"), "misc": self.misc_bytes},
            "routes": [asdict(row) for row in self.routes()],
            "ranks": {
                "trainers": self.analysis.train_ranks,
                "engines": self.analysis.gen_ranks,
                **{
                    what.replace(" ", "_"): list(amounts.values())
                    for what, amounts in self.bytes_by_rank.items()
                },
            },
            "links": [
                {
                    "name": link.name,
                    "bytes": link.nbytes,
                    "gb_per_s": link.rate_gb_per_s,
                    "seconds": link.seconds,
                }
                for link in self.links
            ],
            "staging_bytes": self.staging_bytes,
            "round_bytes": self.round_bytes,
            "misc_reasons": misc,
            "seconds_compile_max": self.slowest_part.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
            "busiest_link_ratio": self.analysis.busiest_link_ratio,
            "predicted_seconds": self.predicted_seconds,
            "bound_seconds": self.bound_seconds,
            "misc_seconds": self.misc_seconds,
            "sparse": None if (sparse := self.sparse) is None else asdict(sparse),
            "violations": [],
        }


def json_of_problems(model: str, train: str, gen: str, violations: list[str]) -> dict[str, object]:
    """The same keys where no plan can be made: figures are null."""
    return {
        "model": model,
        "train": train,
        "gen": gen,
        "quantize": None,
        "bulk_share": None,
        "bytes": {"bulk": None, "misc": None},
        "routes": [],
        "ranks": None,
        "links": [],
        "staging_bytes": None,
        "round_bytes": None,
        "misc_reasons": {},
        "seconds_compile_max": None,
        "peak_rss_bytes": None,
        "busiest_link_ratio": None,
        "predicted_seconds": None,
        "bound_seconds": None,
        "misc_seconds": None,
        "sparse": None,
        "violations": violations,
    }


def study(options: PlanOptions) -> Study:
    """Plan the refit.

    Raises:
        PlanProblems: the weight to explain does not exist, or the planner found that no plan can be made.
    """
    specs = exported_specs(options.model, options.train)
    positions = {spec.name: i for i, spec in enumerate(specs)}
    if options.explain and options.explain not in positions:
        raise PlanProblems([_unknown(options.explain, list(positions))])
    train, gen = options.train.world_size, options.gen.world_size
    sources, destinations = all_holdings(options.model, options.train, options.gen, positions)
    topology = options.hosts.topology(train, gen)
    started = time.process_time()
    try:
        analysis = analyse(specs, sources, destinations, bucket_bytes=options.bucket_bytes, topology=topology)
    except PlanError as error:
        raise PlanProblems([str(error)]) from error
    shared = time.process_time() - started
    parts = tuple(_part(analysis, rank, shared) for rank in _measured(train, gen, options.compile_ranks))
    peak = _peak_rss_bytes()
    return Study(options, specs, sources, destinations, analysis, parts, peak)


def _part(analysis: Analysis, rank: int, shared: float) -> Part:
    started = time.process_time()
    plan = analysis.compile(rank)
    seconds = shared + time.process_time() - started
    return Part(
        rank,
        seconds,
        plan.messages,
        plan.segments,
        plan.staging_bytes,
        plan.rounds,
        base_bytes(plan, analysis.assignment.receivers),
    )


def _measured(train: int, gen: int, count: int | None) -> list[int]:
    """Ranks spread evenly over the refit world, the first and the last among them; all of it for None."""
    world = train + gen
    chosen = np.linspace(0, world - 1, min(count or world, world)).round().astype(int)
    return sorted(set(chosen.tolist()))


def _unknown(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    # Names of all layers and experts are alike: compare first without the numbers, then with them.
    plain = {_without_numbers(other): other for other in reversed(known)}
    wanted = _without_numbers(name)
    # A part of a name ("q_proj") is unlike the whole.
    shapes = [shape for shape in plain if wanted in shape][:3]
    shapes = shapes or get_close_matches(wanted, list(plain), n=3, cutoff=0.5)
    alike = [other for other in known if _without_numbers(other) in shapes]
    close = get_close_matches(name, alike[:5000], n=3, cutoff=0.5) or [plain[shape] for shape in shapes]
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"explain: the model has no weight {name!r}{hint}"


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _peak_rss_bytes() -> int:
    """The most memory that this process has held, bytes.

    From VmHWM, in KiB: getrusage's figure survives an exec, and so would count whoever started the command.
    """
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024
