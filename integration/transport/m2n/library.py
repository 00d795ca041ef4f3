"""NVIDIA's ``nccl.m2n`` (package ``nccl-extensions``) in this process: whether it can be used, and its communicators.

This module goes by its sources, in NVIDIA/nccl-extensions of 21 August 2026: nccl.m2n 0.2.0. Package 0.1.0 brings that version, with
the same ``nccl_m2n.h``; it has the library as a binary. The sources say:

- A reshard packs into memory of the library, waits there for the other ranks on the GPU, and unpacks. That memory is as large
  as ``NCCL_RESHARD_PACK_BUFFSIZES`` says; without it 2 GiB, four times, which communicators share from the fifth on.
- Between the GPUs of one host a reshard is copies by copy engines and waits of streams (``reshardCopyPackLsaHput``). Reshards that
  are joined in a group (``reshardCopyPackGroupNormalized``) go by a kernel, which needs GIN, and so a network card for RDMA,
  even there.
- Nothing ends a reshard whose peer has gone: its kernel and its stream's waits do not look at the flag that
  ``ncclCommAbort`` sets (``outDevComm->abortFlag`` is set for NCCL's own kernels alone). The process has to end.
- What it keeps of a communicator is freed with the last handle of the process, and has to be before the communicator is.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...comm.waiting import done_within, guarded
from ...errors import RefitError, RefitTimeout, end_all
from ..streams import working_on

logger = logging.getLogger(__name__)

# Oldest NCCL that nccl.m2n 0.2.0 runs on (NCCL_M2N_MIN_NCCL_VERSION_CODE in its nccl_m2n.h).
_OLDEST_NCCL = (2, 30, 5)
# The library's memory for packing, as "bytes:communicators"; read as the first handle of a process is made. More communicators than
# that would share it, and wait for each other. It is allocated as a communicator first needs it, so that the most that the library
# takes (MAX_SPLIT_CONCURRENCY in its reshard_limits.h) costs nothing.
_PACK_BUFFERS = "NCCL_RESHARD_PACK_BUFFSIZES"
_MOST_COMMUNICATORS = 64
# Seconds that giving the library's memory and communicators back may take.
_CLOSE_WITHIN = 30.0
# Seconds for which a call of the library is waited for after its refit has failed.
_RETURN_WITHIN = 5.0


@dataclass
class _Process:
    """What the library shares in a process.

    Attributes:
        handle: while communicators are open.
        users: how many :class:`Communicators` there are.
        pack_bytes: of a communicator's memory for packing, since the handle was made; 0 before.
        communicators: that have such memory until the handle is freed.
        closed: what gives those of them up that are not used any more.
        lost: why the library can't be used any more; empty if it can.
    """

    handle: Any = None
    users: int = 0
    pack_bytes: int = 0
    communicators: int = 0
    closed: list[Callable[[], object]] = field(default_factory=list)
    lost: str = ""


_process = _Process()
# Over the library's calls that make and end what a process shares. It is taken in threads alone that are left to themselves when their
# time is up, since such a call may never return.
_lock = threading.Lock()


def unavailable(device: torch.device, pack_bytes: int, lanes: int) -> str:
    """Why ``nccl.m2n`` can't run in this process; empty if it can.

    Args:
        device: of the weights.
        pack_bytes: that a communicator is to pack at a time.
        lanes: communicators that are to be opened.
    """
    if device.type != "cuda":
        return "nccl.m2n needs GPUs"
    if _process.lost:
        return _process.lost
    try:
        importlib.import_module("nccl.m2n")
        core = importlib.import_module("nccl.core")
    except (ImportError, RuntimeError, OSError) as error:
        return f"nccl.m2n can't be imported ({error}); pip install 'nccl-extensions[cu13]'"
    loaded = core.get_version().libnccl
    if loaded is None:
        return "nccl.m2n found no libnccl"
    if tuple(loaded.version.release) < _OLDEST_NCCL:
        return (
            f"nccl.m2n needs NCCL {'.'.join(map(str, _OLDEST_NCCL))} or newer, and {loaded.version} is loaded; "
            "preload a newer libnccl.so.2 with LD_PRELOAD"
        )
    if os.environ.get("NCCL_CUMEM_ENABLE") != "1":
        return "nccl.m2n needs NCCL's cuMem allocator; start all ranks with NCCL_CUMEM_ENABLE=1"
    if _PACK_BUFFERS in os.environ:
        return f"{_PACK_BUFFERS} is set, and policy.refit.bucket_mb is what sizes that memory; unset it on all ranks"
    if 0 < _process.pack_bytes < pack_bytes:
        return (
            f"nccl.m2n packs {_process.pack_bytes} bytes at a time for all that uses it in this process, as the first of it asked for, "
            f"and {pack_bytes} are asked for now; give all the same bucket_mb or bucket_bytes"
        )
    if _process.communicators + lanes > _MOST_COMMUNICATORS:
        return (
            f"nccl.m2n has memory for {_MOST_COMMUNICATORS} communicators in a process, {_process.communicators} have been opened and "
            f"{lanes} more are asked for; close all sessions that use it, or give fewer streams"
        )
    return ""


def new_ids(count: int) -> list[bytes]:
    """Of communicators; one rank makes them and tells the others."""
    core: Any = importlib.import_module("nccl.core")
    return [bytes(core.get_unique_id()) for _ in range(count)]


class Communicators:
    """The library's communicators of one epoch, one for each lane. All ranks make and close them at the same time, once none of them
    finds the library :func:`unavailable`.

    Args:
        ids: of each lane, the same on all ranks.
        rank: of this process in them.
        size: of them.
        joins: whether reshards are joined in groups, which needs GIN on all ranks.
        device: a CUDA device.
        pack_bytes: of a lane's memory for packing.
        timeout_s: seconds that opening may take.
        watch: called with the stage twice a second meanwhile; raises if another rank has given up.

    Attributes:
        m2n: the module.
        lanes: how many there are.
        pack_bytes: of all lanes' memory for packing, as large as the first in this process asked for.

    Raises:
        RefitError: they can't be made; says why.
        RefitTimeout: a rank did not come.
    """

    def __init__(
        self,
        ids: Sequence[bytes],
        rank: int,
        size: int,
        joins: bool,
        device: torch.device,
        pack_bytes: int,
        timeout_s: float,
        watch: Callable[[str], object],
    ):
        self.m2n: Any = importlib.import_module("nccl.m2n")
        self._core: Any = importlib.import_module("nccl.core")
        self.lanes, self.pack_bytes = len(ids), 0
        self._rank, self._size, self._joins, self._device = rank, size, joins, device
        self._timeout_s, self._watch = timeout_s, watch
        self._comms: list[Any] = []
        self._shares = False
        try:
            self.in_time(partial(self._open, ids, pack_bytes), "connect")
        except BaseException:
            self.close(failed=True)
            raise

    def reshard(self, lane: int, pairs: Sequence[tuple[Any, Any]], stream: int) -> None:
        """Enqueue reshards on a CUDA stream.

        Args:
            lane: whose communicator carries them; a lane's are submitted in the same order on all ranks.
            pairs: descriptors of source and destination.
            stream: its handle.
        """
        comm = self._comms[lane]
        with self._explained("transfer"), self.m2n.group() if self._joins else nullcontext():
            for source, destination in pairs:
                _process.handle.reshard(comm, source, destination, stream=stream)

    def in_time[T](self, call: Callable[[], T], stage: str, stop: threading.Event | None = None) -> T:
        """Make calls of the library, any of which may block for ever, within the limit of time.

        Args:
            call: makes them.
            stage: of errors.
            stop: is set if the time is up or another rank has given up; ``call`` then returns before its next one.

        Raises:
            RefitTimeout: they did not return.
            RefitError: what they raise, or another rank gave up. Where they have not returned by then, the library is lost to this
                process.
        """
        returned = threading.Event()

        def run() -> T:
            try:
                with working_on(self._device):
                    return call()
            finally:
                returned.set()

        def late() -> RefitTimeout:
            return RefitTimeout(
                f"nccl.m2n did not return within {self._timeout_s:.0f} s; a peer is late, stuck or gone",
                stage=stage,
                rank=self._rank,
            )

        try:
            return guarded(run, self._timeout_s, stage, self._watch, late)
        except BaseException:
            if stop is not None:
                stop.set()
            if not returned.wait(_RETURN_WITHIN):
                # Its lock, which all its calls take, is held by a call that may never return.
                lose(f"a call of nccl.m2n ({stage}) has not returned, since a rank died or stopped meanwhile")
            raise

    def close(self, *, failed: bool) -> None:
        """Give the communicators up, once all that was enqueued has ended; safe to call twice. ``failed``: peers may be gone."""
        if _process.lost:
            return
        ended = threading.Event()
        wrong = done_within([partial(self._close, failed), ended.set], _CLOSE_WITHIN)
        if wrong:
            logger.warning("rank %d could not close nccl.m2n: %s", self._rank, wrong)
        if not ended.is_set():
            lose(f"nccl.m2n has not closed its communicators within {_CLOSE_WITHIN:.0f} s")

    def _close(self, failed: bool) -> None:
        with _lock, working_on(self._device):
            if not self._shares:
                return
            self._shares = False
            _process.users -= 1
            _process.closed += [comm.abort if failed else comm.destroy for comm in self._comms]
            self._comms = []
            if _process.users:
                return
            closing = [*([_process.handle.destroy] if _process.handle is not None else []), *_process.closed]
            _process.handle, _process.closed = None, []
            _process.pack_bytes = _process.communicators = 0
            end_all(closing)

    def _open(self, ids: Sequence[bytes], pack_bytes: int) -> None:
        with self._explained("connect"):
            with _lock:
                _process.users += 1
                _process.communicators += len(ids)
                self._shares = True
            for raw in ids:
                unique = self._core.UniqueId.from_bytes(raw)
                self._comms.append(self._core.Communicator.init(self._size, self._rank, unique))
            with _lock:
                if _process.handle is None:
                    with _pack_buffers(f"{pack_bytes}:{_MOST_COMMUNICATORS}"):
                        _process.handle = self.m2n.Handle.create()
                    _process.pack_bytes = pack_bytes
                self.pack_bytes = len(ids) * _process.pack_bytes

    @contextmanager
    def _explained(self, stage: str) -> Iterator[None]:
        try:
            yield
        except RefitError:
            raise
        except Exception as error:
            raise RefitError(
                f"nccl.m2n refuses: {type(error).__name__}: {error}. Use policy.refit.transport p2p, or run with NCCL_DEBUG=WARN and "
                "NCCL_RESHARD_LOG_LEVEL=WARN to see its reason",
                stage=stage,
                rank=self._rank,
            ) from error


def lose(why: str) -> None:
    """Note that the library can't be used in this process any more, since a call or its work on the GPU does not end: ``why``."""
    if not _process.lost:
        _process.lost = f"{why}, and nothing but the end of this process ends that; restart it"
        logger.error("%s", _process.lost)


@contextmanager
def _pack_buffers(value: str) -> Iterator[None]:
    """Size the library's memory: it takes that from the environment alone."""
    os.environ[_PACK_BUFFERS] = value
    try:
        yield
    finally:
        del os.environ[_PACK_BUFFERS]
