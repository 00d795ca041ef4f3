"""A rank's live views of a plan's segments, and the views of their bytes in a message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from ..errors import PlanError, RefitError
from ..layout import Box, Fragment, intersect, local_slice
from ..packing import Strided
from ..packing.encoded import EncodedView, PackedEncoding
from ..plan import Message, Segment

# What a rank holds of a segment: memory, or what is computed of some.
Held = torch.Tensor | EncodedView


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


class Part(NamedTuple):
    """A part of a message in a rank's storage: the live view, and the same part of the message's bytes."""

    live: Held
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
        # Subclasses (vLLM's parameters) would run their own code for each question.
        with torch._C.DisableTorchFunctionSubclass():
            for fragment in fragments:
                _require_storage(fragment)
                self._by_name[fragment.name].append(fragment)

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

    def at_home(self, view: torch.Tensor) -> bool:
        """Whether a view is in the memory of the device that works on it, and not offloaded to the host."""
        return self._device is None or view.device.type == self._device.type

    def require_home(self) -> None:
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
                if not self.at_home(fragment.view) and fragment.view.numel():
                    raise RefitError(
                        f"this weight of the engine lies on {fragment.view.device}, and refits write engines on "
                        f"{self._device}; nothing was written. Bring the engine's weights back to its GPU before the refit",
                        stage="bind",
                        parameter=fragment.name,
                    )

    def of(self, segment: Segment) -> Held:
        """The live view of a planned segment, which lies in one fragment.

        Raises:
            PlanError: no fragment holds it.
        """
        for fragment in self._by_name[segment.name]:
            if intersect(fragment.box, segment.box) == segment.box:
                return _part_of(fragment, segment.box)
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
                    packed = packed_view(buffer, segment, fragment.dtype)
                    found.append(Part(_part_of(fragment, common), packed[local_slice(segment.box, common)]))
        return found


def in_memory(held: Held) -> torch.Tensor:
    """What an engine wants; :meth:`LiveViews.require_home` has seen that it is memory."""
    assert isinstance(held, torch.Tensor)
    return held


def _part_of(fragment: Fragment, box: Box) -> Held:
    """A part of a fragment, in the full tensor's coordinates."""
    index = local_slice(fragment.box, box)
    if fragment.encoding is not None:
        window = tuple((part.start, part.stop) for part in index)
        return EncodedView(fragment.view, cast(PackedEncoding, fragment.encoding), window)
    return fragment.view if fragment.box == box else fragment.view[index]


def packed_view(buffer: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """A segment's bytes in the buffer of its message, in the segment's shape."""
    raw = buffer[segment.offset : segment.offset + segment.nbytes]
    return raw.view(dtype).view([stop - start for start, stop in segment.box])


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as uint8 ``[n]``, on the same storage."""
    # as_strided, since one element counts as contiguous whatever its stride is, and could not be seen as bytes.
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


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
