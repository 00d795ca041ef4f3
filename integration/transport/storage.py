"""A rank's storage as transports use it: live views of a plan's segments, and whether their memory is still there.

Parameters may lie in host memory beside a GPU. If it is page-locked, the GPU's kernels read it at its own addresses. If it
is pageable, the host copies it to the GPU: it is not registered with the driver for the kernels, since that locks pages as a
whole, the first and last pages hold other tensors' bytes as well, and CUDA refuses to copy a tensor that lies in registered
memory only in part.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import PlanError, RefitError
from ..layout import Box, Fragment, intersect, local_slice
from ..packing import Strided
from ..packing.encoded import EncodedView, PackedEncoding
from ..packing.host import kernels_read
from ..plan import Message, Segment

logger = logging.getLogger(__name__)

# What a rank holds of a segment: memory, or what is encoded from some.
LiveView = torch.Tensor | EncodedView


class Place(NamedTuple):
    """Where a fragment lies."""

    name: str
    box: Box
    encoding: object
    storage: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def range(self) -> tuple[int, int]:
        """Address, and bytes from the first to behind the last element."""
        memory = Strided(
            self.address,
            self.shape,
            tuple(stride * self.dtype.itemsize for stride in self.strides),
            self.dtype.itemsize,
        )
        return self.address, memory.extent


class _MessageView(NamedTuple):
    """What a rank holds of a segment: the live view, and the same elements in the message's bytes."""

    live: LiveView
    packed: torch.Tensor


class LiveViews:
    """A rank's fragments, looked up by weight and box."""

    def __init__(self, fragments: Sequence[Fragment], device: torch.device | None = None):
        """Look at where they lie.

        Args:
            fragments: of this rank.
            device: that works on them; None for the CPU.

        Raises:
            RefitError: the storage of a fragment has been freed.
        """
        self._device = device
        self._by_name: dict[str, list[Fragment]] = defaultdict(list)
        self._by_box: dict[tuple[str, Box], Fragment] = {}
        # Subclasses (vLLM's parameters) would run their own code for each question.
        with torch._C.DisableTorchFunctionSubclass():
            for fragment in fragments:
                _require_storage(fragment)
                self._by_name[fragment.name].append(fragment)
                self._by_box.setdefault((fragment.name, fragment.box), fragment)

    def places(self) -> tuple[Place, ...]:
        """Equal for fragments of which each lies where the other's does, in the same storage."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(
                Place(
                    f.name,
                    f.box,
                    f.encoding,
                    f.view.untyped_storage()._cdata,
                    f.view.data_ptr(),
                    f.view.shape,
                    f.view.stride(),
                    f.view.dtype,
                )
                for fragments in self._by_name.values()
                for f in fragments
            )

    def on_device(self, view: torch.Tensor) -> bool:
        """Whether a view is in the memory of the device that works on it, and not offloaded to the host."""
        return self._device is None or view.device.type == self._device.type

    def require_on_device(self) -> None:
        """Check that everything can be written.

        Raises:
            RefitError: a fragment lies in host memory beside a GPU.
        """
        for fragments in self._by_name.values():
            for fragment in fragments:
                if fragment.encoding is not None:
                    raise RefitError(
                        "this weight of the engine is said to be computed, and can't be written; nothing was. An engine's "
                        "fragments are views of its parameters",
                        stage="bind",
                        parameter=fragment.name,
                    )
                if not self.on_device(fragment.view) and fragment.view.numel():
                    raise RefitError(
                        f"this weight of the engine lies on {fragment.view.device}, and refits write engines on "
                        f"{self._device}; nothing was written. Bring the engine's weights back to its GPU before the refit",
                        stage="bind",
                        parameter=fragment.name,
                    )

    def of(self, segment: Segment) -> LiveView:
        """The live view of a planned segment, which lies in one fragment.

        Raises:
            PlanError: no fragment holds it.
        """
        # Most segments are whole fragments, of which a weight may have thousands.
        whole = self._by_box.get((segment.name, segment.box))
        if whole is not None:
            return _view_of(whole, segment.box)
        for fragment in self._by_name[segment.name]:
            if intersect(fragment.box, segment.box) == segment.box:
                return _view_of(fragment, segment.box)
        raise PlanError(
            f"this rank holds no fragment with {segment.box}; the plan was made for other storage. Open a session with "
            "a new epoch",
            stage="bind",
            parameter=segment.name,
        )

    def in_message(self, message: Message, buffer: torch.Tensor) -> list[_MessageView]:
        """What this rank holds or wants of a message, which may be nothing or lie in many fragments.

        Args:
            message: any.
            buffer: its bytes, uint8 ``[message.nbytes]``.
        """
        found: list[_MessageView] = []
        for segment in message.segments:
            for fragment in self._by_name[segment.name]:
                common = intersect(fragment.box, segment.box)
                if common is not None:
                    packed = packed_view(buffer, segment, fragment.dtype)
                    found.append(
                        _MessageView(_view_of(fragment, common), packed[local_slice(segment.box, common)])
                    )
        return found


class HostMemory:
    """Watches the host memory that some views lie in beside a GPU; it stays its owner's and is not kept."""

    def __init__(
        self, views: Iterable[torch.Tensor], device: torch.device, others: Iterable[torch.Tensor] = ()
    ):
        """
        Args:
            views: of any memory.
            device: that is to read them; nothing of them is watched for a CPU.
            others: what is watched wherever it lies.
        """
        self._watched = [StorageWeakRef(view.untyped_storage()) for view in others]
        if device.type != "cuda":
            return
        pageable = 0
        for storage in _storages(views):
            self._watched.append(StorageWeakRef(storage))
            if not kernels_read(torch.empty(0, dtype=torch.uint8).set_(storage)):
                pageable += storage.nbytes()
        if pageable:
            logger.info(
                "%.1f MB of parameters lie in pageable host memory: the host copies them to the GPU bucket by bucket; "
                "pinned memory is read by the GPU itself",
                pageable / 1e6,
            )

    @staticmethod
    def of(fragments: Sequence[Fragment], device: torch.device) -> HostMemory:
        """Of weights that ``device`` packs or unpacks.

        What it encodes by torch is watched wherever it lies. Such encoders find a weight by its storage, and not by its address: one
        that is freed is gone, even if another one has come to lie in its place.
        """
        by_torch = []
        for fragment in fragments:
            if fragment.encoding is not None:
                method = cast(PackedEncoding, fragment.encoding).method
                if device.type != "cuda" or not method.has_kernel(fragment.view.dtype):
                    by_torch.append(fragment.view)
        return HostMemory((fragment.view for fragment in fragments), device, by_torch)

    def moved(self) -> bool:
        """Whether some of it has been freed, so that anything may lie at its addresses, or nothing."""
        return any(reference.expired() for reference in self._watched)


class DeviceMemory:
    """Tells whether a GPU's memory is mapped still where it was, without keeping it.

    torch's allocator keeps what is freed, mapped as it was, until it gives it back to the driver, and it counts what it
    has given back. While that count stands still, whatever lay in its memory can be read where it lay.
    """

    def __init__(self, device: torch.device, ranges: Callable[[], Iterable[tuple[int, int]]]):
        """
        Args:
            device: a CUDA device.
            ranges: gives (address, bytes) of what lies there from now on; called once at most, and later.
        """
        self._device = device
        self._ranges = ranges
        self._seen = self._returned = self._bytes_returned()
        self._in_torch: bool | None = None

    def still_mapped(self) -> bool:
        """Whether it surely is. No, where memory is not of torch's own allocator, or may have been given back."""
        self._seen = self._bytes_returned()
        if self._seen != self._returned:
            return False
        if self._in_torch is None:
            self._in_torch = self._held_by_torch(self._ranges())
        return self._in_torch

    def confirm_unmoved(self) -> None:
        """The caller has checked that all is where it was, after :meth:`still_mapped` could not tell."""
        self._returned = self._seen

    def _bytes_returned(self) -> int:
        found: int = torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["freed"]
        return found

    def _held_by_torch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        if torch.cuda.get_allocator_backend() != "native":
            return False
        held = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            # Other pools of torch (vLLM's sleep mode has one) unmap their memory behind its back.
            if segment["device"] == self._device.index and segment["segment_pool_id"] == (0, 0)
        )
        starts = [start for start, _ in held]

        def inside(address: int, nbytes: int) -> bool:
            place = bisect_right(starts, address) - 1
            return place >= 0 and address + nbytes <= held[place][1]

        return all(inside(address, nbytes) for address, nbytes in ranges if nbytes)


def in_memory(held: LiveView) -> torch.Tensor:
    """What an engine wants; :meth:`LiveViews.require_on_device` has seen that it is memory."""
    assert isinstance(held, torch.Tensor)
    return held


def _view_of(fragment: Fragment, box: Box) -> LiveView:
    """What a fragment holds of a box, which is given in the full tensor's coordinates."""
    index = local_slice(fragment.box, box)
    if fragment.encoding is not None:
        window = tuple((part.start, part.stop) for part in index)
        return EncodedView(fragment.view, cast(PackedEncoding, fragment.encoding), window)
    return fragment.view if fragment.box == box else fragment.view[index]


def packed_view(buffer: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """A segment's bytes in the buffer of its message, in the segment's shape."""
    raw = buffer[segment.offset : segment.offset + segment.nbytes]
    return raw.view(dtype).view([stop - start for start, stop in segment.box])


def unowned(raw: torch.Tensor) -> torch.Tensor:
    """The same bytes, without keeping GPU memory from being freed: as a plain address, which its owner may outlive.

    Args:
        raw: uint8 ``[n]``.
    """
    return torch.as_tensor(_Address(raw), device=raw.device) if raw.device.type == "cuda" else raw


class _Address:
    """GPU memory in the form in which libraries hand it to each other."""

    def __init__(self, raw: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": (raw.numel(),),
            "typestr": "|u1",
            "data": (raw.data_ptr(), False),
            "version": 2,
        }


def _require_storage(fragment: Fragment) -> None:
    view = fragment.view
    if not view.numel():
        return
    last = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    end = (view.storage_offset() + last + 1) * view.element_size()
    present = view.untyped_storage().nbytes()
    if present < end:
        raise RefitError(
            f"this weight was offloaded with its storage freed: it needs {end} bytes of a storage that has {present}. "
            "Nothing was read or written. Bring the parameters back before the refit, or hand over fragments of their "
            "host copies",
            stage="bind",
            parameter=fragment.name,
        )


def _storages(views: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The host storages behind views, each once."""
    found = {
        storage.data_ptr(): storage
        for view in views
        if view.device.type == "cpu" and (storage := view.untyped_storage()).nbytes()
    }
    return list(found.values())
