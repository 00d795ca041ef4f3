"""One rank of four: Megatron models under Bridge's adapters, held against Bridge's own exports."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlrefit.workers.lora import PREFIX, SETTINGS_NAME, AdapterSettings, split_name
from tests.families.cases import Layout
from tests.families.ranks import accept_families, build, compare, exported, forget, randomize

VERSIONS = 2
RANK, ALPHA = 4, 6


@dataclass(frozen=True)
class Case:
    """A family in a layout of four ranks, under adapters.

    Attributes:
        kind: Bridge's class of adapters.
        fields: of it.
    """

    family: str
    layout: Layout
    kind: str = "LoRA"
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> tuple[str, bool]:
        return self.family, self.layout.pp == 1


def examine(rank: int, cases: dict[str, Case], checkpoints: dict[tuple[str, bool], str], folder: str) -> None:
    """Write ``FOLDER/NAME.json`` of each case."""
    accept_families()
    ordered = sorted(cases.items(), key=lambda item: item[1].layout.groups)
    for (name, case), following in zip(ordered, (*ordered[1:], None), strict=True):
        found = _examine(case, checkpoints[case.checkpoint])
        forget(following is not None and following[1].layout.groups == case.layout.groups)
        if rank == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(found))


def _examine(case: Case, checkpoint: str) -> dict[str, Any]:
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    from rlrefit.workers.trainers.megatron.adapter_source import AdapterSource
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    bridge, model = build(case.layout, checkpoint)
    {"LoRA": LoRA, "CanonicalLoRA": CanonicalLoRA}[case.kind](dim=RANK, alpha=ALPHA, **case.fields)(model)
    source = MegatronSource(bridge, model)
    for task in source._tasks:
        randomize(task)
    trained = {
        n: p.detach().clone() for chunk in model for n, p in chunk.named_parameters() if ".adapter." not in n
    }
    alone = AdapterSource(bridge, model)
    merged, adapters = [], []
    source.fragments()
    for version in range(VERSIONS):
        _change_adapters(model, version)
        for copy in source._merged.copies:
            copy.data.fill_(float("nan"))
        source.prepare()
        alone.prepare()
        wanted = exported(bridge, model)
        merged.append(compare(source, wanted) | {"changed": _changed(bridge, model, wanted)})
        factors = bridge.export_adapter_weights(model, cpu=True, show_progress=False)
        text = {SETTINGS_NAME: _settings(alone)}
        adapters.append(compare(alone, text | {f"{PREFIX}{name}": factor for name, factor in factors}))
    return {
        "merged": merged,
        "alone": adapters,
        "touched": [
            name
            for chunk in model
            for name, p in chunk.named_parameters()
            if name in trained and not p.equal(trained[name])
        ],
    }


def _changed(bridge: Any, model: list[Any], merged: dict[str, torch.Tensor]) -> int:
    """Weights that the adapters change."""
    base = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False, merge_adapter_weights=False))
    return sum(
        not weight.equal(merged[name.replace(".base_layer", "")])
        for name, weight in base.items()
        if ".base_layer" in name
    )


def _settings(source: Any) -> torch.Tensor:
    """The settings that travel, which are those of all layers."""
    (_, text), *_ = source.export([SETTINGS_NAME])
    settings = AdapterSettings.from_tensor(text)
    layers = {path for name, *_ in source.specs() if (path := (split_name(name) or ("", ""))[0])}
    assert settings == AdapterSettings(dict.fromkeys(layers, RANK), dict.fromkeys(layers, ALPHA / RANK))
    return text


def _change_adapters(model: Sequence[Any], version: int) -> None:
    """Values that no other factor and no other shard has; replicas have the same."""
    from megatron.core import parallel_state

    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            if ".adapter." not in name:
                continue
            stage = parallel_state.get_pipeline_model_parallel_rank()
            expert = ".experts." in name
            place = parallel_state.get_expert_model_parallel_rank() if expert and parameter.ndim == 3 else 0
            tensor = 0 if expert else parallel_state.get_tensor_model_parallel_rank()
            text = f"{version} {stage} {number} {name} {place} {tensor}"
            generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
