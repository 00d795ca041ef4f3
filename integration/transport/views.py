"""A rank's live views of a plan's segments, and the views of their bytes in a message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import PlanError
from ..layout import Fragment, intersect, local_slice
from ..plan import Message, Segment


class Part(NamedTuple):
    """A part of a message in a rank's storage: the live view, and the same part of the message's bytes."""

    live: torch.Tensor
    packed: torch.Tensor


class LiveViews:
    """A rank's fragments, looked up by weight and box."""

    def __init__(self, fragments: Sequence[Fragment]):
        self._by_name: dict[str, list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            self._by_name[fragment.name].append(fragment)

    def of(self, segment: Segment) -> torch.Tensor:
        """The live view of a planned segment, which lies in one fragment.

        Raises:
            PlanError: no fragment holds it.
        """
        for fragment in self._by_name[segment.name]:
            if fragment.box == segment.box:
                return fragment.view
            if intersect(fragment.box, segment.box) == segment.box:
                return fragment.view[local_slice(fragment.box, segment.box)]
        raise PlanError(
            f"this rank holds no fragment with {segment.box}; the plan was made for other storage. Open a session with "
            "a new epoch",
            stage="bind",
            parameter=segment.name,
        )

    def parts(self, message: Message, buffer: torch.Tensor) -> list[Part]:
        """What this rank holds or wants of a message, which may be nothing or lie in many fragments.

        Args:
            message: any.
            buffer: its bytes, uint8 ``[message.nbytes]``.
        """
        found: list[Part] = []
        for segment in message.segments:
            for fragment in self._by_name[segment.name]:
                common = intersect(fragment.box, segment.box)
                if common is not None:
                    packed = packed_view(buffer, segment, fragment.view.dtype)
                    found.append(
                        Part(
                            fragment.view[local_slice(fragment.box, common)],
                            packed[local_slice(segment.box, common)],
                        )
                    )
        return found


def packed_view(buffer: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """A segment's bytes in the buffer of its message, in the segment's shape."""
    raw = buffer[segment.offset : segment.offset + segment.nbytes]
    return raw.view(dtype).view([stop - start for start, stop in segment.box])


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as uint8 ``[n]``, on the same storage."""
    # as_strided, since one element counts as contiguous whatever its stride is, and could not be seen as bytes.
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)
