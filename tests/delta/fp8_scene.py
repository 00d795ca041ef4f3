"""Trainers in BF16 and engines in FP8 blocks, of whose weights a share changes from version to version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.quantize.blocks import scale_box
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import wire_specs
from tests.refit.synthetic import BF16, Layout, SyntheticDestination, whole

from .scene import CONFIG as PLAIN
from .scene import Source, value

CONFIG = replace(PLAIN, trainer_quantize_fp8=True)
FORMATS: dict[str, Format] = {
    "column": Fp8Blockwise(),
    "row": Mxfp8(),
    "cut": Fp8Blockwise(),
    "expert.0": Fp8Blockwise(ue8m0=True),
    "expert.1": Fp8Blockwise(ue8m0=True),
}
SPECS = [
    TensorSpec("norm", (384,), BF16),
    TensorSpec("column", (512, 384), BF16),
    TensorSpec("row", (256, 640), BF16),
    TensorSpec("cut", (300, 200), torch.float16),
    TensorSpec("expert.0", (130, 256), BF16),
    TensorSpec("expert.1", (130, 256), BF16),
    TensorSpec("router", (8, 384), BF16),
]
WIRE = [wire for s in SPECS for wire in (wire_specs(s, FORMATS[s.name]) if s.name in FORMATS else [s])]
BULK = sum(spec.nbytes for spec in WIRE if spec.name != "router")


def sources(trainers: int = 2, device: str = "cpu") -> list[Source]:
    """A trainer with all weights, or two at TP2 and EP2, of which a shard of ``cut`` ends within a block."""
    refused = {"router": "MoE router"}
    if trainers == 1:
        return [Source(SPECS, whole(SPECS), refused, device)]
    found = []
    for rank in (0, 1):
        layout: Layout = {spec.name: [box_of(spec.shape)] for spec in SPECS if spec.name not in FORMATS}
        layout["column"] = [((256 * rank, 256 * (rank + 1)), (0, 384))]
        layout["row"] = [((0, 256), (256, 640) if rank else (0, 256))]
        layout["cut"] = [((70, 300) if rank else (0, 70), (0, 200))]
        layout[f"expert.{rank}"] = [box_of((130, 256))]
        found.append(Source(SPECS, layout, refused, device))
    return found


class Destination(SyntheticDestination):
    """An engine rank with codes and scales in the place of most weights."""

    share = Source.share

    def __init__(self, boxes: dict[str, Box], device: str = "cpu"):
        layout: Layout = {name: [box] for name, box in boxes.items()}
        for name, format in FORMATS.items():
            if name in boxes:
                layout[name + format.scale_name_end] = [scale_box(boxes[name], format.block)]
        super().__init__(WIRE, layout, device)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        return {name: format for name, format in FORMATS.items() if (name, self._box(name)) in self._wanted}

    def _box(self, name: str) -> Box | None:
        return next((box for held, box in self._wanted if held == name), None)

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.view(torch.uint8).fill_(0x7F)

    def wrong(self, version: int) -> list[str]:
        """What is not, bit for bit, what the full tensors are quantized to."""
        expected: dict[str, torch.Tensor] = {}
        for spec in SPECS:
            full, format = value(spec, self.share, version), FORMATS.get(spec.name)
            names = [wire.name for wire in wire_specs(spec, format)] if format else [spec.name]
            expected |= zip(names, format.encode(full) if format else [full], strict=True)
        return [
            f"{name} {box}"
            for (name, box), held in self._wanted.items()
            if not torch.equal(
                _raw(held), _raw(expected[name][local_slice(box_of(expected[name].shape), box)])
            )
        ]


class Promising(Destination):
    """One that leaves codes and scales as they were written."""

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        return {}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _columns(rank: int, size: int) -> dict[str, Box]:
    """A share of the columns of each weight, which cuts blocks."""
    boxes: dict[str, Box] = {}
    for spec in SPECS:
        last = spec.shape[-1]
        share = -(-last // size)
        boxes[spec.name] = (*box_of(spec.shape[:-1]), (rank * share, min((rank + 1) * share, last)))
    return boxes


def engines(layout: str, kind: type[Destination] = Promising, device: str = "cpu") -> list[Any]:
    """Engine ranks: ``tp1`` is one with all weights, ``tp2`` two with a half each, ``ep2`` two with an expert each."""
    boxes = {spec.name: box_of(spec.shape) for spec in SPECS}
    if layout == "tp1":
        return [kind(boxes, device)]
    if layout == "tp2":
        return [kind(_columns(rank, 2), device) for rank in (0, 1)]
    return [kind({n: b for n, b in boxes.items() if n != f"expert.{1 - rank}"}, device) for rank in (0, 1)]
