"""Signals: how a receiver learns that a sender's bytes, and then its checksums, have landed.

Each receiver has a small buffer on its GPU with one number for each sender. A sender writes a larger number there after its
copies, on the same stream, and the receiver polls. The senders write their checksums into the same buffer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from ...gpu_memory.driver import call

# A signal is 64 bits wide so that checksums lie aligned behind it; its lower half holds the number.
SIGNAL_BYTES = 8
CHECKSUM_BYTES = 16
# Seconds within which a copy of a few bytes to the host is usually done.
_COPY_S = 5e-5


def data_landed(refit: int) -> int:
    """The signal of a sender all of whose bytes of a refit (counted from 1) have landed."""
    return 3 * refit - 2


def checksums_landed(refit: int) -> int:
    """The signal of a sender whose checksums of that refit have landed as well."""
    return 3 * refit - 1


def void(refit: int) -> int:
    """The signal in place of both of a sender whose weights were no longer where it read them."""
    return 3 * refit


class SignalBuffer:
    """A receiver's: a signal for each sender, then two sums for each of its messages.

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
        signals = len(self.senders) + len(self.senders) % 2
        self.memory = torch.zeros(signals + 2 * count, dtype=torch.int64, device=device)
        self.checksums = self.memory[signals:].view(count, 2)
        self._signals = self.memory[: len(self.senders)]
        self._on_host = torch.zeros(len(self.senders), dtype=torch.int64).pin_memory()
        self._seen: list[int] = []
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        self._copying = False
        # Peers may write as soon as they know the address.
        torch.cuda.current_stream(device).synchronize()

    def signal_address(self, sender: int) -> int:
        """Where ``sender`` writes its signal."""
        return int(self._signals[self.senders.index(sender)].data_ptr())

    def checksum_address(self, sender: int) -> int:
        """Where the checksums of ``sender``'s messages go."""
        return int(self.checksums.data_ptr()) + CHECKSUM_BYTES * self._first[sender]

    def missing(self, number: int) -> list[int] | None:
        """The senders that have not signalled ``number`` or a later one; None while the answer is on its way, which it waits for only
        for as long as it usually takes."""
        # One copy to the host at a time, on a stream of its own: nothing on the caller's stream is waited for.
        if not self._copying:
            with torch.cuda.stream(self._stream):
                self._on_host.copy_(self._signals, non_blocking=True)
                self._copied.record()
            self._copying = True
        # A pause of the caller's takes longer, and would come between the question and the answer each time.
        until = time.monotonic() + _COPY_S
        while not self._copied.query():
            if time.monotonic() > until:
                return None
        self._copying = False
        self._seen = self._on_host.tolist()
        return [sender for sender, last in zip(self.senders, self._seen, strict=True) if last < number]

    def was_signalled(self, number: int) -> bool:
        """Whether the last look found ``number`` as the signal of some sender."""
        return number in self._seen


def signal(address: int, number: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a signal: it becomes visible after all that ``stream`` did before has, to every GPU and the host.

    The driver's write comes after a system-wide memory fence.
    """
    call("cuStreamWriteValue32", stream.cuda_stream, address, number, 0)
