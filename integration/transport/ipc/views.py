"""A plan's messages bound to memory, and the same memory as a peer that writes or reads it is told of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import TransportUnavailable
from ...gpu_memory.description import Description, Encoded, Place, Shared, View
from ...gpu_memory.mapping import tensor_at
from ...gpu_memory.memory import ExportedMemory
from ...layout import Box, volume
from ...packing import EncodedView, NotComputable, Strided
from ...plan import Message, Segment
from ..storage import LiveViews
from .checksums import BoundMessage
from .told_encodings import global_scale_of, heard, told

# Bytes of a global scale.
_SCALE = 4


@dataclass(frozen=True)
class OpenView:
    """Memory of this rank that one peer writes or reads, and the address of the global scale by which it encodes; neither is kept."""

    memory: Strided
    encoded: Encoded | None = None
    global_scale: int | None = None


@dataclass(frozen=True)
class OpenViews:
    """All memory of this rank that peers write or read.

    Attributes:
        by_peer: the views of each peer's segments, in the order of the plan.
        encodings: that they point to, as plain data.
    """

    by_peer: Mapping[int, Sequence[OpenView]]
    encodings: tuple[object, ...] = ()

    @staticmethod
    def of(peers: Mapping[int, Sequence[BoundMessage]]) -> OpenViews:
        """Of each peer's bound messages.

        Raises:
            TransportUnavailable: a weight is encoded in a way that a peer can't follow.
        """
        encodings: list[object] = []

        def opened(segment: Segment, view: Strided | EncodedView) -> OpenView:
            if isinstance(view, Strided):
                return OpenView(view)
            try:
                encoding = told(view.encoding, view.held.dtype)
            except NotComputable as error:
                raise TransportUnavailable(str(error), stage="bind", parameter=segment.name) from error
            if encoding not in encodings:
                encodings.append(encoding)
            held = Strided.of(view.held)
            scale = global_scale_of(view.encoding)
            return OpenView(
                held,
                Encoded(encodings.index(encoding), held.shape, view.window),
                None if scale is None else scale.data_ptr(),
            )

        by_peer = {
            peer: [opened(s, v) for m, views in bound for s, v in zip(m.segments, views, strict=True)]
            for peer, bound in peers.items()
        }
        return OpenViews(by_peer, tuple(encodings))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of all of them."""
        every = [one for views in self.by_peer.values() for one in views]
        scales = {one.global_scale for one in every if one.global_scale is not None}
        return [
            *((one.memory.address, one.memory.extent) for one in every),
            *((at, _SCALE) for at in sorted(scales)),
        ]

    def described(self, peer: int, exported: ExportedMemory) -> tuple[View, ...]:
        """One peer's, as it is told of them."""

        def view(one: OpenView) -> View:
            encoded = one.encoded
            if encoded is not None and one.global_scale is not None:
                encoded = replace(encoded, global_scale=exported.place(one.global_scale))
            return View(exported.place(one.memory.address), one.memory.strides, one.memory.itemsize, encoded)

        return tuple(map(view, self.by_peer[peer]))


def bind_messages(peers: Mapping[int, Sequence[Message]], views: LiveViews) -> dict[int, list[BoundMessage]]:
    """Each peer's messages with what this rank holds of their segments, as plain addresses: views would keep the memory of
    parameters that are offloaded meanwhile."""

    def held(segment: Segment) -> Strided | EncodedView:
        found = views.of(segment)
        return Strided.of(found) if isinstance(found, torch.Tensor) else found

    return {peer: [(m, [held(s) for s in m.segments]) for m in messages] for peer, messages in peers.items()}


def by_peer(
    rounds: Sequence[Sequence[Message]], peer: Callable[[Message], int]
) -> dict[int, tuple[Message, ...]]:
    """Each peer's messages in the order of rounds, peers ascending."""
    found: dict[int, list[Message]] = defaultdict(list)
    for messages in rounds:
        for message in messages:
            found[peer(message)].append(message)
    return {key: tuple(found[key]) for key in sorted(found)}


def mapped_views(
    messages: Sequence[BoundMessage],
    peer: Description,
    shared: Shared,
    bases: Sequence[int],
    device: torch.device,
) -> list[Strided | EncodedView]:
    """The peer's memory of each segment, as it is mapped here.

    Args:
        messages: that are exchanged with it.
        peer: as it describes itself.
        shared: what of it this rank writes or reads.
        bases: address of each of its allocations here.
        device: that works on it.

    Raises:
        ValueError: it isn't of the segments' sizes, or is encoded in a way that this version does not know.
    """
    encodings = [heard(one) for one in peer.encodings]
    held: dict[tuple[object, ...], torch.Tensor] = {}

    def global_scale(segment: Segment, place: Place | None) -> torch.Tensor:
        if place is None or place.offset % _SCALE:
            raise ValueError(f"{segment.name} has no global scale")
        return tensor_at(Strided(peer.region(place, _SCALE, bases), (), (), _SCALE), torch.float32, device)

    def mapped(segment: Segment, view: View) -> Strided | EncodedView:
        shape = _shape(segment.box)
        if view.encoded is None:
            if volume(segment.box) * view.itemsize != segment.nbytes:
                raise ValueError(f"items of {view.itemsize} bytes for {segment.name}")
            return peer.memory(view, shape, bases)
        one = encodings[view.encoded.encoding]
        # Codes and scales of one view are computed together, if they are known to be of the same one.
        whole = view.place, view.strides, view.encoded.shape, one.held
        if whole not in held:
            held[whole] = tensor_at(peer.memory(view, view.encoded.shape, bases), one.held, device)
        encoding = one.encoding
        if one.has_global_scale:
            encoding = one.under(global_scale(segment, view.encoded.global_scale))
        found = EncodedView(held[whole], encoding, view.encoded.window)
        inside = zip(view.encoded.window, one.encoding.shape(view.encoded.shape), strict=True)
        if any(not 0 <= start <= stop <= n for (start, stop), n in inside):
            raise ValueError(f"{segment.name} is encoded of what is not there")
        if found.shape != shape or found.nbytes != segment.nbytes:
            raise ValueError(f"{found.dtype}{list(found.shape)} for {segment.name}")
        return found

    segments = [segment for message, _ in messages for segment in message.segments]
    return [mapped(segment, view) for segment, view in zip(segments, shared.views, strict=True)]


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
