"""One lane between two GPU ranks: buckets in GPU memory, and counters that their streams write and wait for.

A rank fills the peer's buckets and counts them; the peer's stream waits for the count, empties the bucket and
counts that. The counters are 64-bit words in host memory that both GPUs reach, each written by one rank alone. In
host memory, and not on the GPU, so that the host can end a wait without the GPU's help: with one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``) a write on another stream would queue behind the wait that it is to end.
"""

from __future__ import annotations

import torch

from ...gpu_memory.driver import call
from .host_link import BUCKETS

# A word has a cache line of its own.
_LINE_BYTES = 64
# Of each lane: the counts of filled and of emptied buckets, for each direction.
LANE_WORD_BYTES = 4 * _LINE_BYTES
# CU_STREAM_WAIT_VALUE_GEQ, and CU_STREAM_WRITE_VALUE_DEFAULT: all earlier writes become visible first.
_AT_LEAST = 0
_AFTER_ALL = 0
# Beyond any count; what is at least this far behind counts as reached.
_RELEASED = 1 << 62


class DeviceLink:
    """This rank's end."""

    def __init__(
        self,
        words: torch.Tensor,
        words_on_device: int,
        lower: bool,
        outgoing: int,
        incoming: int,
        bucket_bytes: int,
    ):
        """
        Args:
            words: uint8 ``[LANE_WORD_BYTES]`` in host memory that both ranks have mapped and pinned.
            words_on_device: their address for this rank's GPU.
            lower: whether this rank is the lower one of the two.
            outgoing: address of the peer's buckets, which this rank fills.
            incoming: address of this rank's.
            bucket_bytes: of each bucket.
        """
        ours, theirs = (0, 2) if lower else (2, 0)
        self._counts = words.view(torch.int64)
        # Of what this rank sends: it counts the filled, and waits for the emptied; the other way round for the rest.
        self._filled_out, self._emptied_out = (words_on_device + _LINE_BYTES * (ours + i) for i in range(2))
        self._filled_in, self._emptied_in = (words_on_device + _LINE_BYTES * (theirs + i) for i in range(2))
        self._awaited = [_LINE_BYTES // 8 * (ours + 1), _LINE_BYTES // 8 * theirs]
        self._outgoing, self._incoming = outgoing, incoming
        self._bucket_bytes = bucket_bytes
        self._sent = self._received = 0

    def send(self, part: torch.Tensor, stream: int) -> None:
        """Enqueue one bucket for the peer: ``part`` is contiguous and no larger than a bucket."""
        if self._sent >= BUCKETS:
            call("cuStreamWaitValue64", stream, self._emptied_out, self._sent - BUCKETS + 1, _AT_LEAST)
        place = self._outgoing + self._sent % BUCKETS * self._bucket_bytes
        call("cuMemcpyAsync", place, part.data_ptr(), part.nbytes, stream)
        self._sent += 1
        call("cuStreamWriteValue64", stream, self._filled_out, self._sent, _AFTER_ALL)

    def receive(self, part: torch.Tensor, stream: int) -> None:
        """Enqueue the arrival of one bucket."""
        call("cuStreamWaitValue64", stream, self._filled_in, self._received + 1, _AT_LEAST)
        place = self._incoming + self._received % BUCKETS * self._bucket_bytes
        call("cuMemcpyAsync", part.data_ptr(), place, part.nbytes, stream)
        self._received += 1
        call("cuStreamWriteValue64", stream, self._emptied_in, self._received, _AFTER_ALL)

    def release(self) -> None:
        """End all waits of this rank's streams; what they go on with is worthless. A peer's late count undoes it."""
        for word in self._awaited:
            self._counts[word] = _RELEASED
