"""Signals: how a receiver learns that a sender's bytes, and then its checksums, have landed, or may be read.

Each receiver has a small buffer on its GPU with one number for each sender. A sender writes a larger number there after its
copies, on the same stream, and the receiver polls. The senders write their checksums into the same buffer. A receiver that
pulls has a copy of what its senders write into buffers of their own, fetched each time it polls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from ...gpu_memory.driver import call
from ...packing import Copy
from .portions import PORTIONS

# A signal is 64 bits wide so that checksums lie aligned behind it; its lower half holds the number.
SIGNAL_BYTES = 8
CHECKSUM_BYTES = 16
# Seconds within which a copy of a few bytes to the host is usually done.
_COPY_S = 5e-5


def portion_landed(refit: int, portion: int) -> int:
    """The signal of a sender whose bytes of a refit (counted from 1) have landed up to a portion (counted from 0)."""
    return (PORTIONS + 2) * (refit - 1) + portion + 1


def data_landed(refit: int) -> int:
    """The signal of a sender all of whose bytes of a refit have landed."""
    return portion_landed(refit, PORTIONS - 1)


def checksums_landed(refit: int) -> int:
    """The signal of a sender whose checksums of that refit have landed as well."""
    return data_landed(refit) + 1


def readable(refit: int) -> int:
    """The first signal of a sender whose receivers pull: its weights may be read. With the one for checksums it says that until
    then they lay where it had said, whether there are checksums or not."""
    return data_landed(refit)


def void(refit: int) -> int:
    """The signal in place of both of a sender whose weights were no longer where it read them."""
    return data_landed(refit) + 2


class SignalBuffer:
    """A signal for each peer, then two sums for each message that is exchanged with it: a receiver's, which senders write, or a
    sender's own, which receivers read.

    Attributes:
        memory: int64, on the device.
        checksums: int64 ``[messages, 2]``: the part of it that has the checksums.
        peers: in ascending order.
    """

    def __init__(self, messages: Mapping[int, int], device: torch.device):
        """Make an empty one.

        Args:
            messages: number of messages of each peer.
            device: of the parameters.
        """
        self.peers = sorted(messages)
        self._first: dict[int, int] = {}
        count = 0
        for peer in self.peers:
            self._first[peer] = count
            count += messages[peer]
        # Rounded up, so that checksums are aligned to 16 bytes.
        signals = len(self.peers) + len(self.peers) % 2
        self.memory = torch.zeros(signals + 2 * count, dtype=torch.int64, device=device)
        self.checksums = self.memory[signals:].view(count, 2)
        self._signals = self.memory[: len(self.peers)]
        self._on_host = torch.zeros(len(self.peers), dtype=torch.int64).pin_memory()
        self._seen: list[int] = []
        self._fetch: Copy | None = None
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        self._copying = False
        # Peers may write as soon as they know the address.
        torch.cuda.current_stream(device).synchronize()

    def signal_address(self, peer: int) -> int:
        """Where the signal of or for ``peer`` is written."""
        return int(self._signals[self.peers.index(peer)].data_ptr())

    def checksum_address(self, peer: int) -> int:
        """Where the checksums of the messages of or for ``peer`` go."""
        return int(self.checksums.data_ptr()) + CHECKSUM_BYTES * self._first[peer]

    def fetched_by(self, copies: Copy | None) -> None:
        """Have what the senders wrote into their own buffers copied here, signals and checksums, each time that signals are looked
        at; None if they write here."""
        self._fetch = copies

    def fetch(self) -> None:
        """Enqueue these copies on the current stream."""
        if self._fetch is not None:
            self._fetch.launch()

    def idle(self) -> bool:
        """Whether no look at the senders' signals is under way."""
        return not self._copying or bool(self._copied.query())

    def missing(self, number: int) -> list[int] | None:
        """The senders that have not signalled ``number`` or a later one; None while the answer is on its way, which it waits for only
        for as long as it usually takes."""
        # One copy to the host at a time, on a stream of its own: nothing on the caller's stream is waited for.
        if not self._copying:
            with torch.cuda.stream(self._stream):
                self.fetch()
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
        return [sender for sender, last in zip(self.peers, self._seen, strict=True) if last < number]

    def was_signalled(self, number: int) -> bool:
        """Whether the last look found ``number`` as the signal of some sender."""
        return number in self._seen


def signal(address: int, number: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a signal: it becomes visible after all that ``stream`` did before has, to every GPU and the host.

    The driver's write comes after a system-wide memory fence.
    """
    call("cuStreamWriteValue32", stream.cuda_stream, address, number, 0)
