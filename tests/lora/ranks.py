"""Trainer ranks under FSDP2 whose model has peft's adapters, and engine ranks; run in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.fsdp.ranks import Layout, adam_of, mesh_of
from tests.meeting import meeting_in, tell_meeting, wait_for
from tests.spawn import run_sides
from tests.vllm_follower import CONFIG

TRAIN_RANKS, GEN_RANKS, VERSIONS = 4, 2, 2
TOKENS = ((3, 1, 4, 1, 5),)


@dataclass(frozen=True)
class Case:
    """A trainer whose adapters change between refits, and engines that follow.

    Attributes:
        layout: of the trainer; ranks beyond it stay out.
        adapters: fields of the ``LoraConfig`` of each adapter; all of them are active.
        gen_tp: tensor parallelism of an engine.
        refit_dtype: what the trainer exports in.
    """

    folder: Path
    checkpoint: str
    layout: Layout
    adapters: dict[str, dict[str, Any]]
    lora: str = "merge"
    gen_tp: int = 2
    engine: str = "nccl_xfer"
    refit_dtype: torch.dtype | None = torch.bfloat16

    @property
    def config(self) -> dict[str, Any]:
        transport = "auto" if self.engine == "packed_broadcast" else "p2p"
        return {"transport": transport, **CONFIG, "lora": self.lora}

    def saved(self, version: int) -> Path:
        """What peft makes of the whole model: the merged model, or the adapter."""
        return self.folder / f"version{version}"


@dataclass
class Report:
    """What a rank saw."""

    manifest: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run_cases(cases: Sequence[Case]) -> list[tuple[list[Report], list[Report]]]:
    """Run cases one after another in the same processes; for each, the reports of trainer and engine ranks."""
    return run_sides(train, TRAIN_RANKS, serve, GEN_RANKS, cases)


def adapted(case: Case) -> Any:
    """The unsharded model of a case under its adapters, whose values all ranks draw alike."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=case.layout.dtype)
    torch.manual_seed(7)
    configs = {name: LoraConfig(init_lora_weights=False, **fields) for name, fields in case.adapters.items()}
    (first, config), *others = configs.items()
    peft = get_peft_model(model, config, adapter_name=first)
    for name, other in others:
        peft.add_adapter(name, other)
    peft.base_model.set_adapter(list(configs))
    return peft


def shard(peft: Any, layout: Layout, mesh: Any) -> Any:
    """The same, sharded."""
    layers = peft.base_model.model.model.layers
    if layout.tensor > 1:
        for layer in layers:
            plan = {}
            for name, module in layer.named_modules():
                column = name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
                if not column and not name.endswith(("o_proj", "down_proj")):
                    continue
                style = ColwiseParallel if column else RowwiseParallel
                adapters = getattr(module, "lora_A", {})
                plan[f"{name}.base_layer" if adapters else name] = style()
                for adapter in adapters:
                    plan[f"{name}.lora_{'B' if column else 'A'}.{adapter}"] = style()
            parallelize_module(layer, mesh["tp"], plan)
    options: dict[str, Any] = {
        "mesh": mesh["shard"],
        "reshard_after_forward": layout.reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(peft, **options)


def step(model: Any, optimizer: torch.optim.Optimizer, layout: Layout, seed: int) -> None:
    """A step of real training; under tensor parallelism by gradients that need no sums over its ranks."""
    if layout.tensor == 1:
        tokens = torch.randint(0, 62, (2, 5), generator=torch.Generator().manual_seed(seed))
        model(input_ids=tokens, labels=tokens).loss.backward()
    else:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, cases: Sequence[Case]) -> list[Report]:
    reports = []
    for case in cases:
        mesh = mesh_of(case.layout)
        reports.append(_train(rank, case, mesh) if rank < case.layout.ranks else Report())
    return reports


def _train(rank: int, case: Case, mesh: Any) -> Report:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin

    trained = shard(adapted(case), case.layout, mesh)
    optimizer = adam_of(trained)

    class Trainer(FSDPRefitMixin):
        model = trained
        refit_config = RefitConfig(**case.config)
        refit_dtype = case.refit_dtype

    worker, report = Trainer(), Report()
    assert worker.prepare_nccl_xfer_refit_info()["refused"].keys() <= {"adapter_config.json"}
    if rank == 0:
        rendezvous = worker.open_refit_rendezvous("127.0.0.1", case.layout.ranks, GEN_RANKS)
        tell_meeting(case.folder, rendezvous)
    report.manifest = worker.join_refit(meeting_in(case.folder), rank, case.engine)
    shards = case.engine == "nccl_xfer"
    send = worker.nccl_xfer_refit if shards else worker.broadcast_weights_for_collective
    for version in range(VERSIONS):
        step(trained, optimizer, case.layout, version)
        report.records.append(send(version))
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in trained.state_dict().items()
        }
        exported = dict(worker._prepared_source().export(list(worker.prepare_refit_info())))
        if rank == 0:
            report.wrong += _against_peft(case, version, whole, exported)
    worker.close_refit()
    return report


def _against_peft(
    case: Case, version: int, whole: dict[str, torch.Tensor], exported: dict[str, torch.Tensor]
) -> list[str]:
    """Save what peft makes of the whole tensors, and return the names of exported ones that differ."""
    from peft import get_peft_model_state_dict

    oracle = adapted(case)
    oracle.load_state_dict(whole)
    if case.lora == "merge":
        merged = oracle.merge_and_unload()
        if case.refit_dtype is not None:
            merged = merged.to(case.refit_dtype)
        merged.save_pretrained(case.saved(version))
        expected = merged.state_dict()
    else:
        oracle.save_pretrained(case.saved(version))
        (adapter,) = case.adapters
        expected = get_peft_model_state_dict(oracle, adapter_name=adapter)
        del exported["adapter_config.json"]
    case.saved(version).with_suffix(".done").touch()
    return sorted(expected.keys() ^ exported.keys()) + [
        name for name in expected if not torch.equal(expected[name].to(exported[name].dtype), exported[name])
    ]


def prepare_unevenly(rank: int) -> dict[str, str]:
    """What a source of two ranks says, by what is done on which of them alone; nothing where it is prepared."""
    from peft import LoraConfig, get_peft_model

    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.trainers.fsdp.source import FSDPSource
    from tests.fsdp.models import smallest

    torch.manual_seed(3)
    config = LoraConfig(init_lora_weights=False, target_modules=["q_proj"])
    peft = get_peft_model(smallest(num_hidden_layers=2), config)
    layout = Layout(2)
    source = FSDPSource(shard(peft, layout, mesh_of(layout)))
    source.fragments()
    queries = [layer.self_attn.q_proj for layer in peft.base_model.model.model.layers]

    def prepared() -> str:
        try:
            source.prepare()
        except RefitError as error:
            return str(error)
        return ""

    found = {"alike": prepared()}
    queries[rank].enable_adapters(False)  # as many factors are gathered on both ranks, of different layers
    found["another layer on each"] = prepared()
    queries[1 - rank].enable_adapters(False)
    found["none on both"] = prepared()
    if rank == 1:
        queries[0].merged_adapters.append("default")
    found["merged and disabled on rank 1"] = prepared()
    queries[0].merged_adapters.clear()
    for layer in queries:
        layer.enable_adapters(True)
    if rank == 0:
        queries[0].scaling["default"] *= 2
    found["scaled on rank 0"] = prepared()
    return found


def serve(rank: int, cases: Sequence[Case]) -> list[Report]:
    return [_serve(rank, case) for case in cases]


def _serve(rank: int, case: Case) -> Report:
    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    worker, report = TransformersEngine(case.checkpoint, torch.bfloat16, case.gen_tp), Report()
    worker.join_refit(meeting_in(case.folder), case.layout.ranks + rank, case.config, case.engine)
    shards = case.engine == "nccl_xfer"
    receive = worker.nccl_xfer_refit if shards else worker.update_weights_from_collective
    difference = _merged_difference if case.lora == "merge" else _adapter_difference
    for version in range(VERSIONS):
        for name, parameter in worker.model.named_parameters():
            if case.lora == "merge" or ".lora_" in name:
                parameter.fill_(float("nan"))
        report.records.append(receive(version))
        assert worker.refit_state.version == version
        wait_for(case.saved(version).with_suffix(".done"))
        report.wrong += [f"v{version} {name}" for name in difference(case, version, worker.model)]
    worker.close_refit()
    return report


def _merged_difference(case: Case, version: int, model: Any) -> list[str]:
    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    oracle = TransformersEngine(str(case.saved(version)), torch.bfloat16, case.gen_tp).model
    state = model.state_dict()
    return [n for n, t in oracle.state_dict().items() if t.dtype != state[n].dtype or not t.equal(state[n])]


def _adapter_difference(case: Case, version: int, model: Any) -> list[str]:
    """Names of factors that differ from those of the adapter that peft loads itself, and whether the logits do."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.bfloat16)
    (adapter,) = case.adapters
    # Where peft saves it.
    folder = case.saved(version) if adapter == "default" else case.saved(version) / adapter
    oracle = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
    found = model.state_dict()
    wrong = [
        key
        for key, tensor in oracle.base_model.model.state_dict().items()
        if not tensor.to(case.refit_dtype).equal(found[key.replace(".default", ".refit")])
    ]
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        if not oracle(input_ids=tokens).logits.equal(model(input_ids=tokens).logits):
            wrong.append("logits")
    return wrong
