"""Which bucket each round is staged in: a few take turns, and a bucket that is passed on stays till then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Staging:
    """Buckets of one direction.

    Attributes:
        bucket_of: for each round its bucket, or -1 if it stages nothing.
        nbytes: size of each bucket.
        before: for each round the round that had its bucket last, or -1.
    """

    bucket_of: tuple[int, ...]
    nbytes: tuple[int, ...]
    before: tuple[int, ...]


def share_buckets(
    needs: Sequence[int], lanes: Sequence[int], readers: Sequence[Sequence[int]], turns: int
) -> Staging:
    """Give rounds their buckets.

    In each lane a bucket is taken again ``turns`` rounds later, so that one is filled while others are on the
    wire; where a later round than that still reads a bucket, the lane gets one more.

    Args:
        needs: bytes that each round stages.
        lanes: each round's lane.
        readers: for each round the later rounds that pass on what it staged.
        turns: buckets of a lane that take turns, 2 at least.
    """
    staged = [index for index, need in enumerate(needs) if need]
    place = {
        index: sum(lanes[other] == lanes[index] for other in staged[:count])
        for count, index in enumerate(staged)
    }
    bucket_of, before = [-1] * len(needs), [-1] * len(needs)
    sizes: list[int] = []
    tenants: list[int] = []
    for index in staged:
        free = [
            bucket
            for bucket, tenant in enumerate(tenants)
            if lanes[tenant] == lanes[index]
            and place[tenant] <= place[index] - turns
            and all(reader < index for reader in readers[tenant])
        ]
        if free:
            bucket = min(free, key=tenants.__getitem__)
            before[index] = tenants[bucket]
        else:
            bucket = len(sizes)
            sizes.append(0)
            tenants.append(index)
        sizes[bucket] = max(sizes[bucket], needs[index])
        tenants[bucket] = index
        bucket_of[index] = bucket
    return Staging(tuple(bucket_of), tuple(sizes), tuple(before))
