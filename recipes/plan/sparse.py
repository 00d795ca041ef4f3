"""Sparse refits (``policy.refit.delta``) of a planned one, as they would be if what changes is spread evenly.

Rates are those of BENCHMARKS.md, "Delta refits", of an H200, and follow the rate at which a GPU copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...integration.delta.blocks import MOST, expected_bytes
from ...integration.delta.streams import Stream, sent
from ...integration.plan import Analysis, Message, Plan
from ...integration.plan.assignment import Receiver
from .hosts import Hosts

# Share of elements that differ → seconds for 4e9 elements: "The kernels alone", and for those of one byte what refits in FP8 leave
# for them. Between these shares, and beyond the last one, they are taken to grow with what kernels look at: units of 16 bytes with a
# difference, and differences.
_PACK_S = {
    2: {0.0: 3.65e-3, 1e-3: 5.8e-3, 1e-2: 6.3e-3, 0.1: 12.8e-3},
    1: {0.0: 2.6e-3, 1.6e-3: 3.7e-3, 3.2e-3: 4.6e-3, 3.2e-2: 6.6e-3},
}
# By a mask, of elements of two bytes, with the sum of all weights.
_PACK_MARKED_S = {0.0: 3.5e-3, 1e-3: 5.6e-3, 1e-2: 6.1e-3, 3e-2: 7.25e-3, 0.1: 11.0e-3}
_APPLY_S = {0.0: 0.0, 1e-3: 2.3e-3, 1e-2: 3.3e-3, 0.1: 12.3e-3}
_ELEMENTS = 4e9
# What that GPU copies ("Packing on one GPU"), bytes counted once, GB/s; and the share of it at which whole FP8 blocks are made.
_COPY_GB_PER_S, _QUANTIZE_SHARE = 2130.0, 0.94
# A sparse refit of Qwen3-8B where nothing changed, less what its packing takes by the table above: begin, headers, commit.
_REST_S = 10.8e-3 - 16.4 / 8 * 3.65e-3
# Bytes of a stream for each byte of a bucket that a section has (integration/delta/path.py).
_SECTION = 2.5


@dataclass(frozen=True)
class SparseRefit:
    """A sparse refit.

    Attributes:
        changed: share of the elements that differ.
        wire_bytes: over all engine ranks, those of the misc path among them.
        wire_ratio: of those of a dense refit.
        seconds: predicted.
    """

    changed: float
    wire_bytes: int
    wire_ratio: float
    seconds: float


@dataclass(frozen=True)
class Sparse:
    """Sparse refits and what they take.

    Attributes:
        delta_base: that the times are of.
        base_bytes: ``policy.refit.delta_base`` → bytes that a trainer rank keeps, at most over the measured ranks.
        refits: one for each share.
    """

    delta_base: str
    base_bytes: dict[str, int]
    refits: tuple[SparseRefit, ...]


def predict(
    analysis: Analysis,
    hosts: Hosts,
    base: Mapping[int, int],
    *,
    changed: tuple[float, ...],
    delta_base: str,
    bucket_bytes: int,
    quantized: bool,
    misc: tuple[int, float],
) -> Sparse:
    """Predict sparse refits of a plan.

    Args:
        analysis: of the dense refit.
        hosts: where its ranks are.
        base: size of an element → bytes of the base, of the trainer rank with the largest one.
        changed: shares of elements that differ.
        delta_base: where the base is.
        bucket_bytes: ``policy.refit.bucket_mb``.
        quantized: whether trainers quantize as they pack.
        misc: bytes that go whole to each engine rank, and seconds that they take.
    """
    train, gen = analysis.train_ranks, analysis.gen_ranks
    sent = analysis.assignment.origins(train, gen)
    by_size: Counter[int] = Counter()
    for entry in analysis.manifest:
        if entry.route == "bulk":
            by_size[entry.spec.dtype.itemsize] += entry.spec.nbytes
    bulk = sum(by_size.values()) or 1
    elements = sum(nbytes // size for size, nbytes in by_size.items()) / bulk * int(sent.sum(axis=0).max())
    misc_bytes, misc_seconds = misc
    sections = max(1.0, sum(base.values()) / (_SECTION * bucket_bytes))
    slower = _COPY_GB_PER_S / hosts.copy
    refits = []
    for share in changed:
        ratio = sum(nbytes * _ratio(size, share) for size, nbytes in by_size.items()) / bulk
        pairs = np.zeros((train + gen,) * 2, dtype=np.int64)
        pairs[:train, train:] = np.ceil(sent * ratio)
        wire = int(pairs.sum()) + gen * misc_bytes
        stages = [
            _pack_seconds(base, share, delta_base, hosts, quantized=quantized),
            max((link.seconds for link in analysis.topology.links(pairs)), default=0.0),
            slower * elements / _ELEMENTS * _at(_APPLY_S, share, 1),
        ]
        # All three at once but for the first and the last section, unless they are on the same GPUs.
        beside = (sum(stages) - max(stages)) / (1 if hosts.shared_gpus else sections)
        seconds = _REST_S + max(stages) + beside + misc_seconds
        refits.append(SparseRefit(share, wire, wire / (int(sent.sum()) + gen * misc_bytes or 1), seconds))
    whole = sum(base.values())
    # A bit for each element (integration/delta/mask.py); beside a base too, of what differs from it.
    mask = sum(-(-nbytes // (8 * size)) for size, nbytes in base.items())
    return Sparse(delta_base, {"gpu": whole + mask, "host": whole, "optimizer": mask}, tuple(refits))


def base_bytes(plan: Plan, receivers: Sequence[Receiver]) -> dict[int, int]:
    """Size of an element → bytes that a rank keeps to compare with: of each stream that it sends, once.

    Args:
        plan: the rank's.
        receivers: engine ranks that get the same streams.
    """
    together = {rank: number for number, one in enumerate(receivers) for rank in one.ranks}
    messages: dict[int, list[Message]] = defaultdict(list)
    for _, message in sorted(sent(plan).items()):
        messages[together[message.destination]].append(message)
    streams = {stream.key: stream for stream in map(Stream.of, messages.values())}
    found: Counter[int] = Counter()
    for stream in streams.values():
        found.update({size: end - begin for size, (begin, end) in stream.extents.items()})
    return dict(found)


def _ratio(itemsize: int, share: float) -> float:
    """Bytes of blocks, of those of the elements."""
    return expected_bytes(MOST, itemsize, share) / (MOST * itemsize)


def _pack_seconds(
    base: Mapping[int, int], share: float, delta_base: str, hosts: Hosts, *, quantized: bool
) -> float:
    """Of a trainer rank."""
    found = 0.0
    for size, nbytes in base.items():
        # A mask's kernel looks at units of 16 bytes, whatever their elements are.
        table = _PACK_MARKED_S if delta_base == "optimizer" else _PACK_S[min(size, 2)]
        found += nbytes / (min(size, 2) * _ELEMENTS) * _at(table, share, 16 // size)
    found *= _COPY_GB_PER_S / hosts.copy
    if quantized:
        # Two bytes are read for each code that is written; the rate counts a byte that is read and written once.
        found += 3 / 2 * base.get(1, 0) / (_QUANTIZE_SHARE * hosts.copy * 1e9)
    if delta_base == "host":
        found = max(found, sum(base.values()) / hosts.pcie / 1e9)
    return found


def _at(measured: Mapping[float, float], share: float, together: int) -> float:
    """Of a share of elements that are looked at if one of ``together`` neighbours differs."""
    looked_at = [1 - (1 - one) ** together for one in (*measured, share)]
    times = list(measured.values())
    slope = (times[-1] - times[-2]) / (looked_at[-2] - looked_at[-3])
    return float(np.interp(looked_at[-1], looked_at[:-1], times)) + slope * max(
        0.0, looked_at[-1] - looked_at[-2]
    )
