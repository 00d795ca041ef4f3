"""Gather strided views into a message's buffer and scatter them out, and checksums of both.

All views are made once per epoch; a refit then runs one fused copy per direction and round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import PlanError
from .layout import Box, Fragment, intersect, local_slice
from .plan import CHECKSUM_BYTES, EVERYONE, Message, Segment

# Words per block of the checksum; also bounds its temporary memory.
_BLOCK = 1 << 16
_PRIME = 1_000_003


@dataclass(frozen=True)
class PackedMessage:
    """A message bound to this rank's storage.

    Attributes:
        message: the message as planned.
        buffer: its bytes in the staging buffer, uint8 of shape ``[message.nbytes]``.
        packed: views of ``buffer``, one for each copy, in the parameters' dtypes.
        live: the views of live parameters that belong to ``packed``; same shapes and dtypes.
    """

    message: Message
    buffer: torch.Tensor
    packed: list[torch.Tensor]
    live: list[torch.Tensor]

    def gather(self) -> None:
        """Copy the live parameters into the buffer."""
        if self.live:
            torch._foreach_copy_(self.packed, self.live)

    def scatter(self) -> None:
        """Copy the buffer into the live parameters."""
        if self.live:
            torch._foreach_copy_(self.live, self.packed)

    def checksum(self) -> torch.Tensor:
        """Position-sensitive checksum of the buffer's payload, int64 of shape ``[2]``."""
        return checksum(self.buffer[:-CHECKSUM_BYTES])

    @property
    def checksum_slot(self) -> torch.Tensor:
        """The message's last bytes as int64 ``[2]``: checksum as the sender computed it."""
        return self.buffer[-CHECKSUM_BYTES:].view(torch.int64)


def bind(
    messages: Sequence[Message], fragments: Sequence[Fragment], staging: torch.Tensor
) -> list[PackedMessage]:
    """Bind one round's messages of this rank to its fragments and to its staging buffer.

    Args:
        messages: the messages of one round and direction; they lie in ``staging`` one after another.
        fragments: this rank's fragments.
        staging: uint8, at least as long as the messages together.

    Raises:
        PlanError: a segment that no fragment holds.
    """
    by_name: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        by_name[fragment.name].append(fragment)
    bound: list[PackedMessage] = []
    cursor = 0
    for message in messages:
        buffer = staging[cursor : cursor + message.nbytes]
        cursor += message.nbytes
        packed: list[torch.Tensor] = []
        live: list[torch.Tensor] = []
        for segment in message.segments:
            for fragment, common in _holders(
                by_name[segment.name], segment, whole=message.destination != EVERYONE
            ):
                raw = buffer[segment.offset : segment.offset + segment.nbytes]
                shape = [stop - start for start, stop in segment.box]
                packed.append(raw.view(fragment.view.dtype).view(shape)[local_slice(segment.box, common)])
                live.append(fragment.slice(common))
        bound.append(PackedMessage(message, buffer, packed, live))
    return bound


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """Checksum of a uint8 tensor that changes when bytes change or move: int64 of shape ``[2]``.

    The bytes are read as 32-bit words in blocks; each word is weighted by its place in the block and
    each block by a power of a prime, in wrapping 64-bit arithmetic. The second number is the plain
    weighted sum of the words' squares, so that errors which cancel in one sum show in the other.
    """
    words = raw.view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    weights = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        weighted = block * weights[: block.numel()]
        total = total * _PRIME + torch.stack((weighted.sum(), (weighted * block).sum()))
    return total


def _holders(fragments: Sequence[Fragment], segment: Segment, whole: bool) -> list[tuple[Fragment, Box]]:
    """The fragments that share elements with a segment, and the common boxes.

    A planned segment lies in one fragment; a broadcast one may touch none or many of a destination's.
    """
    found: list[tuple[Fragment, Box]] = []
    for fragment in fragments:
        common = intersect(fragment.box, segment.box)
        if whole and common == segment.box:
            return [(fragment, common)]
        if not whole and common is not None:
            found.append((fragment, common))
    if whole:
        raise PlanError(
            f"this rank holds no fragment with {segment.box}", stage="bind", parameter=segment.name
        )
    return found
