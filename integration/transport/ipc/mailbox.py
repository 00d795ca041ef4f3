"""Mailboxes: where senders leave their checksums, and ring when their bytes and when their checksums have landed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...gpu_memory.driver import call

# A bell is 64 bits wide so that checksums lie aligned behind it; its lower half holds the number it was rung with.
BELL_BYTES = 8
CHECKSUM_BYTES = 16


def landed(refit: int) -> int:
    """What a sender rings with when all its bytes of a refit (counted from 1) have landed."""
    return 3 * refit - 2


def proven(refit: int) -> int:
    """What it rings with when its checksums of that refit have landed as well."""
    return 3 * refit - 1


def void(refit: int) -> int:
    """What it rings with, in place of both, when it has sent what lay where its weights no longer are."""
    return 3 * refit


class Mailbox:
    """A receiver's: a bell for each sender, then two sums for each of its messages.

    Attributes:
        memory: int64, on the device.
        checksums: int64 ``[messages, 2]``: the part of it where senders write their checksums.
        senders: in ascending order.
    """

    def __init__(self, messages: Mapping[int, int], device: torch.device):
        """Make an empty one.

        Args:
            messages: number of messages of each sender.
            device: of the parameters.
        """
        self.senders = sorted(messages)
        self._first: dict[int, int] = {}
        count = 0
        for sender in self.senders:
            self._first[sender] = count
            count += messages[sender]
        # Rounded up, so that checksums are aligned to 16 bytes.
        bells = len(self.senders) + len(self.senders) % 2
        self.memory = torch.zeros(bells + 2 * count, dtype=torch.int64, device=device)
        self.checksums = self.memory[bells:].view(count, 2)
        self._bells = self.memory[: len(self.senders)]
        self._seen = torch.zeros(len(self.senders), dtype=torch.int64).pin_memory()
        self._rung: list[int] = []
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        self._looking = False
        # Peers may write as soon as they know the address.
        torch.cuda.current_stream(device).synchronize()

    def bell_address(self, sender: int) -> int:
        """Where ``sender`` rings."""
        return int(self._bells[self.senders.index(sender)].data_ptr())

    def checksum_address(self, sender: int) -> int:
        """Where the checksums of ``sender``'s messages go."""
        return int(self.checksums.data_ptr()) + CHECKSUM_BYTES * self._first[sender]

    def missing(self, number: int) -> list[int] | None:
        """The senders that have not rung with ``number`` or a later one; None while the answer is on its way. Does not wait."""
        if not self._looking:
            with torch.cuda.stream(self._stream):
                self._seen.copy_(self._bells, non_blocking=True)
                self._copied.record()
            self._looking = True
        if not self._copied.query():
            return None
        self._looking = False
        self._rung = self._seen.tolist()
        return [sender for sender, last in zip(self.senders, self._rung, strict=True) if last < number]

    def last_rung(self, number: int) -> bool:
        """Whether the bells of some sender last seen were rung with ``number``."""
        return number in self._rung


def ring(address: int, number: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a ring with ``number``: after all that ``stream`` did before has become visible to every GPU and the host.

    The driver's write comes after a system-wide memory fence.
    """
    call("cuStreamWriteValue32", stream.cuda_stream, address, number, 0)
