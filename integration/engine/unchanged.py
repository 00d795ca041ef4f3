"""What a rank told of its fragments when the ranks met has to hold for the whole epoch, wherever its storage moves.

Segments, messages and the bytes in them were made of names, boxes and dtypes, so a weight that changes one of these would be
read as something else on the other end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..control.channel import Channel
from ..errors import RefitMismatch
from ..layout import Box, Fragment, Misfit, volume
from ..weights.manifest import dtype_name

# Name, full shape, box, and the dtype of what travels, which is not always that of the storage.
_Row = tuple[str, tuple[int, ...], Box, torch.dtype]


class AgreedFragments:
    """This rank's fragments as they were when the ranks agreed.

    Args:
        fragments: of this rank.
        left_out: names of weights that may change, since nothing was made of this rank's fragments of them.
    """

    def __init__(self, fragments: Sequence[Fragment], left_out: Collection[str]):
        self._left_out = frozenset(left_out)
        self._rows = _rows(fragments, self._left_out)
        self._asked = 0

    def again(
        self, channel: Channel, ask: Callable[[], tuple[list[Fragment], dict[str, str]]]
    ) -> list[Fragment]:
        """This rank's fragments where they lie now. Called on all ranks at the same time.

        Args:
            channel: of the epoch.
            ask: for the fragments, and the weights that must not go shard to shard, with reasons.

        Raises:
            RefitMismatch: on every rank, if a weight changed on any: names the first such rank and its first such weight.
        """
        fragments: list[Fragment] = []
        try:
            fragments, refused = ask()
            changed = self._changed(fragments, refused)
        except Misfit as error:
            changed = error.name, str(error)
        topic = f"unchanged/{self._asked}"
        self._asked += 1
        if channel.barrier(topic, flag=changed is not None):
            rank, name, how = next(
                (rank, *told) for rank, told in enumerate(channel.vote(f"{topic}/by", changed)) if told
            )
            raise RefitMismatch(
                f"this weight changed on {channel.world.describe(rank)} since the ranks met: {how}. The plan was made for "
                "what it was, and its bytes would be read as something else, so nothing was written. Undo the change, or let "
                "all ranks meet in a new epoch",
                stage="bind",
                rank=channel.world.rank,
                parameter=name,
                blamed=rank,
            )
        return fragments

    def _changed(self, fragments: Sequence[Fragment], refused: Mapping[str, str]) -> tuple[str, str] | None:
        """The first weight that is not as it was, and how it differs."""
        rows = _rows(fragments, self._left_out | refused.keys())
        # Endpoints tell them in one order, so that this is all, nearly always.
        if rows == self._rows:
            return None
        before, now = _by_name(self._rows), _by_name(rows)
        for name in dict.fromkeys((*before, *now)):
            if before[name] != now[name]:
                found = refused.get(name) or _listed(now[name])
                return name, f"it was {_listed(before[name])}, and is now {found}"
        return None


def _rows(fragments: Sequence[Fragment], left_out: Collection[str]) -> list[_Row]:
    # Subclasses (vLLM's parameters) would run their own code for each dtype.
    with torch._C.DisableTorchFunctionSubclass():
        return [(f.name, f.full_shape, f.box, f.dtype) for f in fragments if f.name not in left_out]


def _by_name(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """Each weight's rows by their boxes, whatever order they were told in; none without elements."""
    found: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        if volume(row[2]):
            found[row[0]].append(row)
    for parts in found.values():
        parts.sort(key=lambda row: row[2])
    return found


def _listed(rows: Sequence[_Row]) -> str:
    if not rows:
        return "not held here"
    parts = ", ".join(f"{dtype_name(dtype)}{list(shape)} {box}" for _, shape, box, dtype in rows[:3])
    return parts if len(rows) <= 3 else f"{parts} and {len(rows) - 3} parts more"
