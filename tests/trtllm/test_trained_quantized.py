"""What a trainer's quantization-aware training computes with, and what its sender would give TensorRT-LLM's engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitMismatch
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Int4
from rlrefit.integration.weights.endpoints import WeightSource, sent_formats, trained_formats
from rlrefit.integration.weights.quantizing import QuantizingSource
from rlrefit.workers.engines.trtllm.sender import TrtllmSender
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.model import QAT
from rlrefit.workers.trainers.qat.source import PackedSource

from .engine_double import expected
from .host_memory import host_handle
from .scene import DEVICE, Scene
from .sources import ListSource

WEIGHT, OTHER = "layers.0.linear.weight", "layers.1.linear.weight"


class _Trainer:
    """A linear layer in quantization-aware training, and one that is left out of it."""

    def __init__(self, config: QATConfig) -> None:
        layers = [
            torch.nn.ModuleDict({"linear": torch.nn.Linear(64, 16, bias=False, dtype=torch.bfloat16)})
            for _ in range(2)
        ]
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        self.qat: QAT = quantize_module(self.model, config)
        self.source = FSDPSource(self.model)

    def change(self, seed: int) -> dict[str, torch.Tensor]:
        """Other weights, by name."""
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
        self.qat.refresh()
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def _scene(extension: type, sent: WeightSource) -> Scene:
    names = [spec.name for spec in sent.specs()]
    return Scene(extension, weights={name: tensor.clone() for name, tensor in sent.export(names)})


def _sender(scene: Scene, source: WeightSource, **keys: Any) -> TrtllmSender:
    return TrtllmSender(source, scene.driver, DEVICE, 600, reduce=host_handle, **keys)


def _refused(scene: Scene, sender: TrtllmSender, parameter: str) -> None:
    """By the name of the first weight; the engine goes on."""
    before = scene.worker.held(), scene.worker.counts()
    with pytest.raises(RefitMismatch) as met:
        sender.refit(9)
    assert (met.value.parameter, met.value.stage) == (parameter, "handshake")
    assert (scene.worker.held(), scene.worker.counts()) == before
    assert scene.worker.step("a") == "tokens of a"


def _refit_twice(scene: Scene, trainer: _Trainer, source: WeightSource, sender: TrtllmSender) -> None:
    for version in (1, 2):
        trainer.change(version)
        sender.refit(version)
        sent = {name: t.clone() for name, t in source.export([spec.name for spec in source.specs()])}
        assert scene.worker.held() == expected(sent)


def test_weights_that_are_trained_in_nvfp4_are_refused_unpacked_and_arrive_packed(extension: type) -> None:
    trainer = _Trainer(QATConfig(activations=False, last_layers=1))
    trainer.change(0)
    packed = PackedSource(trainer.source, trainer.qat)
    packed.prepare()
    scene = _scene(extension, packed)
    sender = _sender(scene, packed)
    sender.refit(0)
    _refused(scene, _sender(scene, trainer.source), WEIGHT)
    _refit_twice(scene, trainer, packed, sender)


def test_weights_that_are_trained_in_int4_are_refused_in_other_formats_and_unquantized(
    extension: type,
) -> None:
    trainer = _Trainer(QATConfig(activations=False, format=Int4(32), last_layers=1))
    # A source of one's own tells nothing.
    own = ListSource(trainer.change(0))
    scene = _scene(extension, own)
    sender = _sender(scene, own)
    sender.refit(0)
    refused: tuple[dict[str, Format], ...] = ({}, {WEIGHT: Fp8Blockwise()}, {WEIGHT: Int4(64)})
    for formats in refused:
        _refused(scene, _sender(scene, QuantizingSource(trainer.source, formats)), WEIGHT)
        _refused(scene, _sender(scene, QuantizingSource(own, formats), qat=trainer.qat), WEIGHT)
    more = QuantizingSource(trainer.source, trainer.qat.formats | {OTHER: Int4(32)})
    _refused(scene, _sender(scene, more), OTHER)
    _refit_twice(scene, trainer, own, sender)


def test_a_model_that_others_were_put_around_is_compared_by_the_names_that_travel(extension: type) -> None:
    trainer = _Trainer(QATConfig(activations=False, format=Int4(32), last_layers=1))
    trainer.change(0)
    source = FSDPSource(torch.nn.ModuleDict({"model": trainer.model, "critic": torch.nn.Linear(16, 16)}))
    scene = _scene(extension, source)
    _sender(scene, ListSource(dict(source.export([spec.name for spec in source.specs()])))).refit(0)
    _refused(scene, _sender(scene, source), f"model.{WEIGHT}")
    assert trained_formats(source) == {
        f"model.{name}": format for name, format in trainer.qat.formats.items()
    }
    packed = QuantizingSource(source, trained_formats(source))
    assert sent_formats(packed) == trained_formats(packed)


def test_training_in_nvfp4_is_told_by_the_source_that_packs_it(extension: type) -> None:
    trainer = _Trainer(QATConfig(activations=False, last_layers=1))
    own = ListSource(trainer.change(0))
    with pytest.raises(ValueError, match="PackedSource"):
        _sender(_scene(extension, own), own, qat=trainer.qat)
