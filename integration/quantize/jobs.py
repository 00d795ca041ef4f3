"""Jobs of quantization: blocks of a weight that are read once, and where their codes and scales go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from ..layout import Box, local_slice
from ..packing.encoded import EncodedPair, PackedEncoding
from ..packing.host import WeakView
from ..packing.strided import Strided
from .blocks import largest_magnitude

Target = torch.Tensor | Strided


@dataclass(frozen=True, eq=False)
class GlobalScale:
    """The scale of a whole weight and of all that shares it, which lies over the scales of its blocks.

    All trainer ranks make it before each refit's packing. Whoever encodes with it reads it when it is launched, so its owner writes it in
    place, and keeps it as long as there are encodings of it.

    Attributes:
        value: FP32 scalar, on the device that encodes.
        found: int32 scalar there: whoever encodes with it raises it to the bits of the largest magnitude (FP32) among what is encoded,
            of NaN if there is one. None if nobody asks for that.
    """

    value: torch.Tensor
    found: torch.Tensor | None = None


class BlockEncoding(PackedEncoding, Protocol):
    """The codes or the scales of a view's blocks."""

    @property
    def global_scale(self) -> GlobalScale | None:
        """Of the view's weight, in formats that have one."""


@dataclass(frozen=True, eq=False)
class QuantizeJob:
    """Blocks that are read once.

    Attributes:
        source: ``[rows, columns]`` of a weight, whole blocks of it; any strides.
        codes: where codes go, of some rows and columns of ``source``; None if nobody wants them.
        first: row and column, among all codes of ``source``, at which ``codes`` begins.
        scales: where the scales of all its blocks go; None if nobody wants them here.
        head: set if ``source`` may cut blocks: its row and column in the block where it begins. With ``codes``, which are then
            of all of it, the scales of the blocks that it touches are read from ``scales``. Without, the scales that its
            parts of these blocks would have are written there.
        global_scale: of the weight, in formats that have one.
    """

    source: torch.Tensor
    codes: Target | None = None
    first: tuple[int, int] = (0, 0)
    scales: Target | None = None
    head: tuple[int, int] | None = None
    global_scale: GlobalScale | None = None

    @property
    def reads_scales(self) -> bool:
        """Whether scales are given."""
        return self.head is not None and self.codes is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        written = (self.codes, None if self.reads_scales else self.scales)
        return sum(target.nbytes for target in written if target is not None)


def of_whole_blocks(jobs: Iterable[QuantizeJob], block: int) -> Iterator[QuantizeJob]:
    """Those of ``jobs`` that have elements.

    Args:
        jobs: none of which may cut blocks.
        block: elements of a row that share a scale.

    Raises:
        ValueError: one cuts blocks.
    """
    for job in jobs:
        if job.source.shape[1] % block or job.head is not None:
            raise ValueError(f"a part of {job.source.shape[1]} columns cuts blocks of {block}")
        if job.source.numel():
            yield job


def make_jobs(pairs: Sequence[EncodedPair]) -> list[QuantizeJob]:
    """The jobs of codes and scales: one for both where they need exactly the same blocks."""
    halves: dict[tuple[int, Box], tuple[list[QuantizeJob], list[QuantizeJob]]] = {}
    for view, target in pairs:
        if not view.nbytes:
            continue
        encoding = cast(BlockEncoding, view.encoding)
        needed = view.blocks
        key = (id(view.held), needed)
        source = view.held[tuple(slice(start, stop) for start, stop in needed)]
        job = QuantizeJob(source, global_scale=encoding.global_scale)
        codes, scales = halves.setdefault(key, ([], []))
        if encoding.unit == encoding.method.block:
            scales.append(replace(job, scales=target))
        else:
            first = tuple(
                w - start // unit
                for (w, _), unit, (start, _) in zip(view.window, encoding.unit, needed, strict=True)
            )
            codes.append(replace(job, codes=target, first=(first[0], first[1])))
    found = []
    for codes, scales in halves.values():
        both = min(len(codes), len(scales))
        found += [replace(c, scales=s.scales) for c, s in zip(codes[:both], scales[:both], strict=True)]
        found += [*codes[both:], *scales[both:]]
    return found


class TorchEncoder:
    """Does jobs with torch, one after another: on CPUs, and for formats without a kernel. Keeps no source."""

    def __init__(
        self,
        jobs: Sequence[QuantizeJob],
        encode: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ):
        """
        Args:
            jobs: their targets are tensors.
            encode: codes and scales of a weight, and of its global scale if the jobs have some.
        """
        self._todo = []
        for job in jobs:
            codes, scales = as_tensor(job.codes), as_tensor(job.scales)
            box = None
            if codes is not None:
                top, left = job.first
                box = ((top, top + codes.shape[0]), (left, left + codes.shape[1]))
            self._todo.append((WeakView(job.source), job.global_scale, codes, box, scales))
        self._encode = encode
        self.nbytes = sum(job.nbytes for job in jobs)

    def launch(self) -> None:
        """Compute and write all.

        Raises:
            RefitError: the memory of a source was freed.
        """
        with torch.no_grad():
            for source, shared, codes_target, box, scales_target in self._todo:
                weight = source.view()
                if shared is not None and shared.found is not None:
                    # The bits of magnitudes have their order.
                    largest = largest_magnitude(weight).view(torch.int32).to(shared.found.device)
                    shared.found.copy_(torch.maximum(shared.found, largest))
                # What lies in host memory is computed there, by a scale that ranks exchanged on their GPUs.
                by = () if shared is None else (shared.value.to(weight.device),)
                codes, scales = self._encode(weight, *by)
                if codes_target is not None and box is not None:
                    origin = tuple((0, 0) for _ in box)
                    codes_target.copy_(codes[local_slice(origin, box)])
                if scales_target is not None:
                    scales_target.copy_(scales)


def as_tensor(target: Target | None) -> torch.Tensor | None:
    """A target of what no kernel computes."""
    assert not isinstance(target, Strided), "make_encoders hands plain memory to kernels only"
    return target
