"""The trainer's part in SGLang's ``update_weights_from_distributed``, without SGLang: its group and its buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, distributed_c10d
from torch.distributed.rendezvous import rendezvous

# SGLang prefixes the keys of the meeting with the group's name.
GROUP = "weight_update_group"
_Weight = tuple[str, torch.Tensor]


def join_update_group(
    host: str, port: int, members: int, backend: str, timeout: timedelta, rank: int = 0
) -> ProcessGroup:
    """The group of the trainer, rank 0, and an engine's workers, as SGLang's ``init_custom_process_group`` makes it.

    ``dist.new_group`` can't make it, since the engine's workers are not ranks of the trainer's world. SGLang's workers, and
    verl's and slime's trainers, use torch's helper likewise.
    """
    store, rank, members = next(rendezvous(f"tcp://{host}:{port}", rank, members, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        members,
        rank,
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(GROUP, store),
        group_name=GROUP,
        timeout=timeout,
    )
    # In it ranks are counted by the group alone.
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(members)}
    assert isinstance(group, ProcessGroup), "every member has it"
    return group


def in_buckets(weights: Iterable[_Weight], nbytes: int) -> Iterator[tuple[list[_Weight], bool]]:
    """Weights in their order, as many at a time as fit into ``nbytes`` and at least one, and whether they are the last.

    Wide numbers come first in a bucket: SGLang views each weight where it lies, which has to be a multiple of its width.
    """
    bucket: list[_Weight] = []
    for name, tensor in weights:
        if bucket and sum(held.nbytes for _, held in bucket) + tensor.nbytes > nbytes:
            yield _widest_first(bucket), False
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield _widest_first(bucket), True


def flattened(bucket: Sequence[_Weight]) -> torch.Tensor:
    """The bytes of a bucket one weight behind another, as SGLang's ``FlattenedTensorBucket`` has them."""
    return torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])


def _widest_first(bucket: list[_Weight]) -> list[_Weight]:
    return sorted(bucket, key=lambda weight: -weight[1].element_size())
