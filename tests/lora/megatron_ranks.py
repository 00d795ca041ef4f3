"""One rank of four: Megatron models under Bridge's adapters, held against Bridge's own exports."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlrefit.workers.lora import PREFIX, SETTINGS_NAME, AdapterSettings, split_name
from tests.families.cases import Layout
from tests.families.ranks import accept_families, build, compare, exported, forget, randomize

VERSIONS = 2
RANK, ALPHA = 4, 6
# The case of what is refused.
REFUSED = "refused"


@dataclass(frozen=True)
class Case:
    """A family in a layout of four ranks, under adapters.

    Attributes:
        kind: Bridge's class of adapters.
        fields: of it.
        exchanged: Bridge takes gate for up as it splits an adapter.
    """

    family: str
    layout: Layout
    kind: str = "LoRA"
    fields: dict[str, Any] = field(default_factory=dict)
    exchanged: bool = False

    @property
    def checkpoint(self) -> tuple[str, bool]:
        return self.family, self.layout.pp == 1


def examine(rank: int, cases: dict[str, Case], checkpoints: dict[tuple[str, bool], str], folder: str) -> None:
    """Write ``FOLDER/NAME.json`` of each case."""
    accept_families()
    ordered = sorted(cases.items(), key=lambda item: item[1].layout.groups)
    for (name, case), following in zip(ordered, (*ordered[1:], None), strict=True):
        checkpoint = checkpoints[case.checkpoint]
        with _exchanging() if case.exchanged else nullcontext():
            found = _refusals(case, checkpoint) if name == REFUSED else _examine(case, checkpoint)
        forget(following is not None and following[1].layout.groups == case.layout.groups)
        if rank == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(found))


@contextmanager
def _exchanging() -> Iterator[None]:
    from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge

    split = MegatronPeftBridge._split_fused_fc1_linear_out_weight

    def exchanged(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = split(*args, **kwargs)
        return up, gate

    with mock.patch.object(MegatronPeftBridge, split.__name__, exchanged):
        yield


def _refusals(case: Case, checkpoint: str) -> dict[str, str]:
    """What sources say of models that can't be refitted, or can't be any more."""
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state

    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.quantize.formats import Int4
    from rlrefit.workers.trainers.megatron.adapter_source import AdapterSource
    from rlrefit.workers.trainers.megatron.source import MegatronSource
    from rlrefit.workers.trainers.offload import Residence
    from rlrefit.workers.trainers.trained import note_trained

    def told(work: Callable[[], object]) -> str:
        try:
            work()
        except RefitError as error:
            return str(error)
        return ""

    bridge, model = build(case.layout, checkpoint)
    found = {"none": told(lambda: AdapterSource(bridge, model))}
    DoRA(target_modules=["linear_proj"])(model)
    found["dora"] = told(lambda: MegatronSource(bridge, model))
    bridge, model = build(case.layout, checkpoint)
    LoRA(dim=RANK)(model)
    found["expert tensor parallelism"] = told(lambda: MegatronSource(bridge, model))
    bridge, model = build(case.layout, checkpoint)
    LoRA(dim=RANK, target_modules=["linear_qkv", "linear_proj"])(model)
    source = MegatronSource(bridge, model)
    wrappers = [m for chunk in model for m in chunk.modules() if hasattr(m, "disable_adapter_layers")]
    wrappers[0].disable_adapter_layers()
    found["disabled"] = told(source.prepare)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        wrappers[0].enable_adapter_layers()
    found["disabled elsewhere"] = told(source.prepare)
    wrappers[0].enable_adapter_layers()
    source.fragments()  # so that prepare gathers factors
    base, factor = wrappers[0].to_wrap, wrappers[0].adapter.linear_in
    refusing = mock.patch.object(Residence, "finish_gathers", side_effect=RefitError("old", stage="export"))
    ways: dict[str, AbstractContextManager[Any]] = {
        "ungathered elsewhere": refusing,
        "replaced elsewhere": mock.patch.dict(base._parameters, weight=torch.nn.Parameter(torch.zeros(1))),
        "away elsewhere": _away(base.weight),
        "factor replaced elsewhere": mock.patch.dict(
            factor._parameters, weight=torch.nn.Parameter(torch.zeros(1))
        ),
        "factor away elsewhere": _away(factor.weight),
    }
    for way, spoiled in ways.items():
        with spoiled if parallel_state.get_tensor_model_parallel_rank() == 1 else nullcontext():
            found[way] = told(source.prepare)
        # The failing rank's next collective would end the one in which it had left the other.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    source.prepare()
    wrappers[0].adapter.alpha = 1
    found["other scaling"] = told(source.prepare)
    next(model[0].parameters()).requires_grad_(True)
    found["trained beside"] = told(lambda: AdapterSource(bridge, model))
    bridge, model = build(case.layout, checkpoint)
    LoRA(dim=RANK, target_modules=["linear_proj"])(model)
    for chunk in model:
        note_trained(chunk, {f"model.layers.0.self_attn.{name}_proj.weight": Int4(32) for name in "qkvo"})
    found["quantized, alone"] = told(lambda: AdapterSource(bridge, model))
    found["quantized, merged"] = told(lambda: MegatronSource(bridge, model))
    return found


@contextmanager
def _away(tensor: torch.Tensor) -> Iterator[None]:
    """Its storage is freed, and no copy of it is known."""
    storage, values = tensor.untyped_storage(), tensor.detach().clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(nbytes)
        tensor.data.copy_(values)


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
    exports = bridge.export_hf_weights(model, cpu=True, show_progress=False, merge_adapter_weights=False)
    # Copies: what is exported of a rank that has all of a weight is the weight.
    adapted = {
        name.replace(".base_layer", ""): weight.clone() for name, weight in exports if ".base_layer" in name
    }
    for version in range(VERSIONS):
        _change_adapters(model, version)
        for copy in source._merged.copies:
            copy.data.fill_(float("nan"))
        source.prepare()
        alone.prepare()
        wanted = exported(bridge, model)
        merged.append(compare(source, wanted) | {"changed": _changed(adapted, wanted)})
        factors = bridge.export_adapter_weights(model, cpu=True, show_progress=False)
        text = {SETTINGS_NAME: _settings(alone)}
        wanted = text | {f"{PREFIX}{name}": factor for name, factor in factors}
        adapters.append(compare(alone, wanted))
        # As an engine gets them that takes no fragments.
        whole = dict(alone.export([spec.name for spec in alone.specs()]))
        adapters[-1]["wrong"] += [name for name, factor in wanted.items() if not factor.equal(whole[name])]
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


def _changed(adapted: dict[str, torch.Tensor], merged: dict[str, torch.Tensor]) -> int:
    """Weights that the adapters change, of those that have some."""
    return sum(not weight.equal(merged[name]) for name, weight in adapted.items())


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
