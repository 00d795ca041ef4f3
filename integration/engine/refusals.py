"""Weights of which a rank has fragments, and that must not go shard to shard from or into them all the same.

They take the misc path: the trainer's export resolves them, and the engine's own loader knows what becomes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..errors import PlanError
from ..layout import Fragment
from ..packing import repeats
from ..quantize.formats import Format, wire_names


def unlike_their_bytes(fragments: Sequence[Fragment], most_itemsize: float) -> dict[str, str]:
    """What neither side can move as the bytes that its memory holds.

    Args:
        fragments: of any rank.
        most_itemsize: bytes of an element at most.

    Returns:
        Hugging Face name → reason.
    """
    found: dict[str, str] = {}
    # Subclasses (vLLM's parameters) would run their own code for each question.
    with torch._C.DisableTorchFunctionSubclass():
        for fragment in fragments:
            view = fragment.view
            if view.is_conj() or view.is_neg():
                found[fragment.name] = "it is a lazy conjugate or negative, whose memory holds other values"
            elif fragment.dtype.itemsize > most_itemsize:
                found[fragment.name] = f"sparse refits compare elements of at most {most_itemsize} bytes"
    return found


def require_written_once(fragments: Sequence[Fragment], rank: int) -> None:
    """Check that each element of an engine's weights has a place of its own.

    Raises:
        PlanError: several share one, as after ``expand``; names the first such weight.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for fragment in fragments:
            if repeats(fragment.view.shape, fragment.view.stride()):
                raise PlanError(
                    f"this engine's weight is expanded: shape {list(fragment.view.shape)} with strides {list(fragment.view.stride())}, "
                    "so that several elements share one place and would keep the last of their values; nothing was written. Give the "
                    "parameter memory of its own (clone() it after expand())",
                    stage="plan",
                    rank=rank,
                    parameter=fragment.name,
                )


def refused_on_engine(
    fragments: Sequence[Fragment],
    refused: Mapping[str, str],
    formats: Mapping[str, Format],
    packed: Collection[str] = (),
) -> dict[str, str]:
    """What an engine rank refuses beside what it says itself.

    Args:
        fragments: of the engine rank.
        refused: what the rank says itself: Hugging Face name → reason.
        formats: Hugging Face name of a weight → the format in which it travels.
        packed: more codes and scales that a trainer makes, by their own names.

    Returns:
        Hugging Face name → reason; those of ``refused`` among them.
    """
    found = dict(refused)
    wire = [wire_names(name, format) for name, format in formats.items()]
    made = {*(name for names in wire for name in names), *packed}
    for name, reason in (_in_another_order(fragments, made) | _sharing(fragments)).items():
        found.setdefault(name, reason)
    # Scales of blocks that trainer ranks cut are made for codes that go shard to shard, and for no others.
    for codes, scales in wire:
        if codes in found:
            found.setdefault(scales, f"the codes of these scales: {found[codes]}")
    return found


def _in_another_order(fragments: Sequence[Fragment], made: Collection[str]) -> dict[str, str]:
    """Codes and scales that are seen by axes: a trainer makes them of blocks of rows and columns."""
    reason = "its elements lie in another order than rows and columns, of which blocks are made"
    return {f.name: reason for f in fragments if f.name in made and f.axes is not None and not f.axes.plain}


def _sharing(fragments: Sequence[Fragment]) -> dict[str, str]:
    """Weights whose memory another name has too, as a head has an embedding's that is tied to it.

    Either could be written last, and the sums of both would not agree. Looked at is all of a view without gaps, and of another one its
    first row; others that lie between each other do not meet.
    """
    runs: list[tuple[int, int, str]] = []
    # Subclasses (vLLM's parameters) would run their own code for each question.
    with torch._C.DisableTorchFunctionSubclass():
        for fragment in fragments:
            view = fragment.view
            if not view.numel():
                continue
            if view.is_contiguous():
                nbytes = view.nbytes
            else:
                nbytes = view.element_size() * (view.shape[-1] if view.stride(-1) == 1 else 1)
            runs.append((view.data_ptr(), nbytes, fragment.name))
    found: dict[str, str] = {}

    def note(name: str, other: str) -> None:
        for one, two in ((name, other), (other, name)):
            found.setdefault(one, f"it lies in the memory of {two}: each would overwrite the other")

    end, before = 0, ""
    for address, nbytes, name in sorted(runs):
        if address < end and name != before:
            note(name, before)
        if address + nbytes > end:
            end, before = address + nbytes, name
    return found
