"""The CUDA driver, played: memory, address spaces of several ranks, and what kernels do, in one process without a GPU.

What lies below ``IpcTransport`` is replaced here (:func:`played`): the driver's calls, streams and events, which are done at
once, and the tables that kernels walk, by the rows that the code made for them. All else is the code itself.
Whatever a rank touches is looked up in its own address space, so stale addresses and stale mappings show.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from rlrefit.integration.gpu_memory import mapping, memory
from rlrefit.integration.gpu_memory.driver import DriverError, driver
from rlrefit.integration.packing import EncodedView, Strided, copy_rows, make_encoders
from rlrefit.integration.packing.encoded import EncodedPair
from rlrefit.integration.packing.rows import Ints, collapse
from rlrefit.integration.quantize.jobs import GlobalScale
from rlrefit.integration.transport.ipc import checksums, landing, signals, transport, views
from rlrefit.integration.transport.ipc.checksums import BoundMessage, MessageChecksums
from rlrefit.integration.transport.ipc.signals import SignalBuffer
from rlrefit.integration.transport.storage import HostMemory, LiveViews

CHUNK = 4096
_SPAN = 64 << 20
_CPU = torch.device("cpu")
_NAN = 0xFF  # as are all bytes of a BF16 that is none

Bytes = npt.NDArray[np.uint8]


class Memory:
    """Physical memory: there as long as a handle or a mapping refers to it."""

    def __init__(self, number: int, handle: int, held: Bytes, *, classic: bool, shareable: bool):
        self.number = number  # never used again
        self.handle = handle  # the smallest one that is free, so that stale handles name other memory soon
        self.held = held
        self.classic = classic  # whether cudaMalloc made it
        self.shareable = shareable  # whether it was made to be mapped by others
        self.references = 1  # handles that are held, and mappings

    @property
    def size(self) -> int:
        return len(self.held)


class AddressSpace:
    """Of a rank: by their first addresses what is reserved, in bytes, and what is mapped."""

    def __init__(self, start: int):
        self.start = start
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, Memory] = {}

    def reserve(self, size: int) -> int:
        """The first addresses that are free, so that those that were given back are soon used for something else."""
        at = self.start
        for base, taken in sorted(self.reserved.items()):
            if at + size < base:
                break
            # A gap behind each: what runs over is noticed, and neighbours are not joined.
            at = base + -(-taken // CHUNK) * CHUNK + CHUNK
        assert at + size < self.start + _SPAN, "no addresses left to play with"
        self.reserved[at] = size
        return at

    def at(self, address: int) -> tuple[int, Memory] | None:
        for base, held in self.mapped.items():
            if base <= address < base + held.size:
                return base, held
        return None


class PlayedDriver:
    """Its methods with names of the driver's functions are what :func:`..driver.call` would call."""

    def __init__(self, ranks: int):
        # Addresses of its own, which nothing else in the process has. Its memory is never touched: pages of it are made
        # only if somebody prints a tensor that lies there.
        self._arena = torch.empty(ranks * _SPAN + CHUNK, dtype=torch.uint8)
        start = -(-self._arena.data_ptr() // CHUNK) * CHUNK
        self.spaces = [AddressSpace(start + rank * _SPAN) for rank in range(ranks)]
        self.alive: dict[int, Memory] = {}  # by its handle
        self.signals: dict[int, int] = {}  # where each rank has its signal buffer
        self.chunked_signals: set[int] = set()  # the ranks whose signal buffers lie in chunks
        self._ever: list[Memory] = []
        self._failing: Counter[str] = Counter()
        self._now = threading.local()
        self._lock = threading.RLock()

    @property
    def rank(self) -> int:
        """The one that this thread plays."""
        return int(self._now.rank)

    @property
    def space(self) -> AddressSpace:
        return self.spaces[self.rank]

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        before = getattr(self._now, "rank", None)
        self._now.rank = rank
        try:
            yield
        finally:
            self._now.rank = before

    def make(self, size: int, *, classic: bool, shareable: bool = True) -> Memory:
        """New memory, full of NaN."""
        return self._make(np.full(size, _NAN, dtype=np.uint8), classic=classic, shareable=shareable)

    def drop(self, held: Memory) -> None:
        held.references -= 1
        assert held.references >= 0, "released once too often"
        if not held.references:
            del self.alive[held.handle]

    def fail(self, function: str, nth: int) -> None:
        """Let a call of ``function`` fail, the ``nth`` from now."""
        self._failing[function] = nth

    def fail_no_more(self) -> None:
        self._failing.clear()

    def signal_buffer(self, messages: Mapping[int, int], device: torch.device) -> SignalBuffer:
        """A signal buffer of this rank, where the process has it."""
        made = SignalBuffer(messages, _CPU)
        held = self._make(made.memory.numpy().view(np.uint8), classic=self.rank not in self.chunked_signals)
        at = self.signals[self.rank] = made.memory.data_ptr()
        self.space.mapped[at] = held
        return made

    def drop_signals(self) -> None:
        for rank, at in self.signals.items():
            self.drop(self.spaces[rank].mapped.pop(at))
        self.signals.clear()

    def load(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> Bytes:
        """Bytes as this rank sees them."""
        return as_strided(self._image(address, _span(shape, strides)), shape, strides)

    def store(self, address: int, values: Bytes, strides: Sequence[int]) -> None:
        """Inverse of :meth:`load`."""
        image = self._image(address, _span(values.shape, strides))
        as_strided(image, values.shape, strides)[...] = values
        for piece in self._pieces(address, len(image)):
            piece[:], image = image[: len(piece)], image[len(piece) :]

    def call(self, function: str, *args: Any) -> Any:
        with self._lock:
            self._failing[function] -= 1
            if self._failing[function] == 0:
                raise DriverError(function, "CUDA_ERROR_PLAYED")
            return getattr(self, function)(*args)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        base, held = self._at("cuMemGetAddressRange", address)
        return base, held.size

    def cuMemRetainAllocationHandle(self, address: int) -> int:
        _, held = self._at("cuMemRetainAllocationHandle", address)
        if held.classic:
            raise DriverError("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")
        return self._take(held).handle

    def cuMemRelease(self, handle: int) -> None:
        self.drop(self.alive[handle])

    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> SimpleNamespace:
        assert handle in self.alive, "a stale handle is looked at"
        shareable = self.alive[handle].shareable
        return SimpleNamespace(requestedHandleTypes=memory.descriptor_type() if shareable else 0)

    def cuMemExportToShareableHandle(self, handle: int, kind: object, flags: int) -> int:
        held = self.alive[handle]
        if not held.shareable:
            raise DriverError("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        number = held.number
        descriptor = os.memfd_create("chunk")
        os.write(descriptor, str(number).encode())
        return descriptor

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: object) -> int:
        return self._take(self._ever[int(os.pread(descriptor, 32, 0))]).handle

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        return self.space.reserve(size)

    def cuMemAddressFree(self, at: int, size: int) -> None:
        assert self.space.reserved.pop(at) == size, "not all that was reserved"
        assert not any(at <= base < at + size for base in self.space.mapped), "given back while mapped"

    def cuMemMap(self, at: int, size: int, offset: int, handle: int, flags: int) -> None:
        held = self.alive[handle]
        assert held.size == size, f"memory of {held.size} bytes is mapped as {size}"
        space = self.space
        assert any(base <= at and at + size <= base + taken for base, taken in space.reserved.items()), (
            "beside"
        )
        assert not any(at < base + m.size and base < at + size for base, m in space.mapped.items()), "twice"
        space.mapped[at] = self._take(held)

    def cuMemSetAccess(self, at: int, size: int, access: object, count: int) -> None:
        inside = [held.size for base, held in self.space.mapped.items() if at <= base < at + size]
        assert sum(inside) == size, "access to what is not mapped"

    def cuMemUnmap(self, at: int, size: int) -> None:
        held = self.space.mapped.pop(at)
        assert held.size == size, f"memory of {held.size} bytes is unmapped as {size}"
        self.drop(held)

    def cuPointerGetAttribute(self, attribute: object, address: int) -> int:
        _, held = self._at("cuPointerGetAttribute", address)
        legacy = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return held.classic if attribute == legacy else held.number

    def cuIpcGetMemHandle(self, address: int) -> Any:
        _, held = self._at("cuIpcGetMemHandle", address)
        handle = driver().CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), str(held.number).encode().ljust(64, b"\0"), 64)
        return handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> int:
        held = self._ever[int(ctypes.string_at(handle.getPtr(), 64).rstrip(b"\0"))]
        if not held.references:
            raise DriverError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE")
        at = self.space.reserve(held.size)
        self.space.mapped[at] = self._take(held)
        return at

    def cuIpcCloseMemHandle(self, at: int) -> None:
        del self.space.reserved[at]
        self.drop(self.space.mapped.pop(at))

    def cuStreamWriteValue32(self, stream: int, address: int, number: int, flags: int) -> None:
        self.store(address, np.array([number], dtype="<u4").view(np.uint8), (1,))

    def _make(self, held: Bytes, *, classic: bool, shareable: bool = True) -> Memory:
        handle = next(n for n in range(1, len(self.alive) + 2) if n not in self.alive)
        made = self.alive[handle] = Memory(
            len(self._ever), handle, held, classic=classic, shareable=shareable
        )
        self._ever.append(made)
        return made

    def _take(self, held: Memory) -> Memory:
        assert held.references, "memory that is gone is taken"
        held.references += 1
        return held

    def _at(self, function: str, address: int) -> tuple[int, Memory]:
        found = self.space.at(address)
        if found is None:
            raise DriverError(function, "CUDA_ERROR_INVALID_VALUE")
        return found

    def _image(self, address: int, nbytes: int) -> Bytes:
        return np.concatenate(list(self._pieces(address, nbytes)))

    def _pieces(self, address: int, nbytes: int) -> Iterator[Bytes]:
        """The memory of some addresses of this rank."""
        end = address + nbytes
        while address < end:
            found = self.space.at(address)
            if found is None:
                assert not any(s.start <= address < s.start + _SPAN for s in self.spaces), (
                    f"rank {self.rank} touches {address:#x}, where it has nothing mapped"
                )
                # Of the process: sums.
                yield np.frombuffer((ctypes.c_uint8 * (end - address)).from_address(address), dtype=np.uint8)
                return
            base, held = found
            part = held.held[address - base : end - base]
            yield part
            address += len(part)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


class _Table:
    def __init__(self, driver: PlayedDriver, rows: Ints):
        self._driver = driver
        self._rows = [
            (a, b, (outer, rows, run), (outer_a, row_a, 1), (outer_b, row_b, 1), slot)
            for a, b, outer, rows, run, outer_a, row_a, outer_b, row_b, slot in rows.tolist()
        ]


class _Copies(_Table):
    def launch(self) -> None:
        for a, b, shape, strides_a, strides_b, _ in self._rows:
            self._driver.store(b, self._driver.load(a, shape, strides_a), strides_b)


class _Encodings:
    """What the code's own encoders make of what this rank sees."""

    def __init__(self, driver: PlayedDriver, pairs: Iterable[EncodedPair]):
        self._driver = driver
        # Addresses, as of kernels: whose memory a view shows does not matter.
        self._pairs = [(view, Strided.of(view.held), target) for view, target in pairs]
        self.nbytes = sum(view.nbytes for view, *_ in self._pairs)

    def launch(self) -> None:
        for view, held, target in self._pairs:
            assert isinstance(target, Strided)
            raw = self._driver.load(held.address, (*held.shape, held.itemsize), (*held.strides, 1))
            seen = torch.from_numpy(raw.copy()).view(view.held.dtype).view(held.shape)
            made = torch.empty(view.shape, dtype=view.dtype)
            encoding: Any = view.encoding
            if getattr(encoding, "global_scale", None) is not None:
                scale = self._driver.load(encoding.global_scale.value.data_ptr(), (4,), (1,))
                value = torch.from_numpy(scale.copy()).view(torch.float32)[0]
                encoding = replace(encoding, global_scale=GlobalScale(value))
            for encoder in make_encoders([(EncodedView(seen, encoding, view.window), made)], _CPU):
                encoder.launch()
            values = made.view(torch.uint8).numpy().reshape(*view.shape, target.itemsize)
            self._driver.store(target.address, values, (*target.strides, 1))


class _Sums(_Table):
    """Other sums than the kernels', which depend on each byte and its place alike."""

    def add_to(self, out: torch.Tensor) -> None:
        for a, offset, shape, strides, packed, slot in self._rows:
            values = self._driver.load(a, shape, strides).astype(np.int64)
            grid = np.ogrid[tuple(slice(n) for n in shape)]
            place = 1 + offset + sum(axis * stride for axis, stride in zip(grid, packed, strict=True))
            out[slot, 0] += int((values * place).sum())
            out[slot, 1] += int((values * place * place).sum())


class _Idle:
    """A stream or an event: all that is enqueued is done at once."""

    cuda_stream = 0

    def __init__(self, device: object = None):
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, stream: object = None) -> None:
        pass

    record = wait_stream = synchronize


class _NotTorchs:
    """Memory that torch's allocator knows nothing of."""

    def __init__(self, device: torch.device, ranges: object):
        pass

    def still_mapped(self) -> bool:
        return False

    def confirm_unmoved(self) -> None:
        pass


@contextmanager
def played(ranks: int) -> Iterator[PlayedDriver]:
    """Let the ``ipc`` transport run on this driver; rank ``r`` is on device ``cuda:r``."""
    play = PlayedDriver(ranks)

    class CopyTable:
        @staticmethod
        def of(rows: Ints, device: torch.device) -> _Copies:
            return _Copies(play, rows)

        @staticmethod
        def build(pairs: Iterable[tuple[Strided, Strided]], device: torch.device) -> _Copies:
            return _Copies(play, copy_rows(pairs))

    class ChecksumTable:
        @staticmethod
        def build(
            views: Sequence[tuple[Strided, int | Strided]], device: torch.device, slots: Sequence[int]
        ) -> _Sums:
            packed = [
                (view, at if isinstance(at, Strided) else Strided.packed(at, view.shape, view.itemsize))
                for view, at in views
            ]
            return _Sums(play, collapse((a, b, slot) for (a, b), slot in zip(packed, slots, strict=True)))

    def on_the_host(
        pairs: Mapping[int, Sequence[BoundMessage]], verify: str, device: object, **options: bool
    ) -> MessageChecksums:
        return MessageChecksums(pairs, verify, _CPU, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, mapping, signals):
            patch.setattr(module, "call", play.call)
        for module in (memory, mapping, transport):
            patch.setattr(module, "process_name", lambda: f"rank {play.rank}")
            patch.setattr(module, "device_uuid", lambda device: "GPU-0")
        patch.setattr(transport, "CopyTable", CopyTable)
        patch.setattr(checksums, "ChecksumTable", ChecksumTable)
        for module in (checksums, transport):
            patch.setattr(module, "make_encoders", lambda pairs, device: [_Encodings(play, pairs)])
        patch.setattr(views, "tensor_at", lambda at, dtype, device: mapping.tensor_at(at, dtype, _CPU))
        for module in (landing, transport):
            patch.setattr(module, "MessageChecksums", on_the_host)
        patch.setattr(transport, "SignalBuffer", play.signal_buffer)
        patch.setattr(transport, "missing", lambda: "")
        # The tensors lie in no GPU's memory as torch has it: none is watched, refused, or missed at home.
        patch.setattr(transport, "kernels_read", lambda view: True)
        patch.setattr(transport, "DeviceMemory", _NotTorchs)
        patch.setattr(transport, "HostMemory", lambda views, device: HostMemory(views, _CPU))
        patch.setattr(transport, "LiveViews", lambda fragments, device=None: LiveViews(fragments))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        for module in (memory, mapping, transport):
            patch.setattr(module, "on_device", lambda device: play.on(device.index))
        patch.setattr(torch.cuda, "Event", _Idle)
        patch.setattr(torch.cuda, "Stream", _Idle)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "current_stream", _Idle)
        yield play
