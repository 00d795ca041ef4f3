"""Host memory that two processes map: it has no name, so that nothing is left of it when both are gone."""

from __future__ import annotations

import fcntl
import logging
import os

import torch

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# cudaHostRegisterPortable and cudaHostRegisterMapped.
_PORTABLE_AND_MAPPED = 3


class Segment:
    """A mapping of such memory; pages take room once they are written. Its end is that of the last mapping.

    Anonymous memory (``memfd``), and not a file in /dev/shm, which a kill would leave behind and which containers
    often keep at 64 MiB.

    Attributes:
        memory: uint8 ``[nbytes]``, zeros at first.
    """

    def __init__(self, descriptor: int, nbytes: int):
        """Map it.

        Args:
            descriptor: of the memory; stays the caller's.
            nbytes: of the memory.

        Raises:
            ValueError: the memory has another size, or its maker could take it away again.
        """
        found = os.fstat(descriptor).st_size
        if found != nbytes:
            raise ValueError(f"shared memory of {found} bytes instead of {nbytes}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("shared memory whose size can still change")
        # Through its path, since mmap of the standard library keeps a descriptor as long as the mapping lives.
        self.memory = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8
        )
        self._pinned = False

    @staticmethod
    def make(nbytes: int) -> tuple[Segment, int]:
        """New memory, mapped, and a descriptor of it that the caller hands on or closes."""
        descriptor = os.memfd_create("rlrefit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            # Or a peer could cut it off, and the next access would end this process.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return Segment(descriptor, nbytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def pin(self) -> bool:
        """Let GPUs reach it; whether they can."""
        status = torch.cuda.cudart().cudaHostRegister(
            self.memory.data_ptr(), self.memory.nbytes, _PORTABLE_AND_MAPPED
        )
        self._pinned = int(status) == 0
        return self._pinned

    def close(self) -> None:
        """Take it back from the GPUs; the mapping ends with the last tensor of it. Safe to call twice."""
        if self._pinned:
            self._pinned = False
            status = torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            if int(status) != 0:
                logger.warning("shared memory stays registered with the GPU: CUDA error %d", int(status))
        self.memory = torch.empty(0, dtype=torch.uint8)
