"""Weights of which an engine rank has fragments, and that must not go shard to shard into them all the same.

They take the misc path: the engine's own loader knows what becomes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..layout import Fragment
from ..quantize.formats import Format


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
    made = {*formats, *(name + format.scale_name_end for name, format in formats.items()), *packed}
    for name, reason in (_in_another_order(fragments, made) | _sharing(fragments)).items():
        found.setdefault(name, reason)
    # Scales of blocks that trainer ranks cut are made for codes that go shard to shard, and for no others.
    for name, format in formats.items():
        if name in found:
            found.setdefault(name + format.scale_name_end, f"the codes of these scales: {found[name]}")
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
