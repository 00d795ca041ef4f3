"""A trainer group and a generation group as two worlds of processes, meeting only through the refit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.meeting import meeting_in, tell_meeting
from tests.spawn import run_sides


@dataclass(frozen=True)
class Epoch:
    """One epoch of a scenario: how weights travel, its number, and the folder in which trainer rank 0 says where to meet."""

    engine: str
    transport: str
    folder: Path
    index: int
    host: str = "127.0.0.1"  # of trainer rank 0

    def config(self) -> dict[str, Any]:
        return {"transport": self.transport, "bucket_mb": 1, "timeout_s": 300.0, "verify": "full"}

    def meet(self) -> dict[str, Any]:
        # The other world may be busy with the models of this scenario and of the one before.
        return meeting_in(self.folder, self.index, within_s=800.0)


@dataclass(frozen=True)
class Scenario:
    """A trainer of two ranks that takes on ``models`` one after another, ``models[0]`` last, with which engines start."""

    layout: dict[str, int]  # fields of MegatronLayout
    gen_tp: int  # the two generation ranks are one engine of TP2 or two of TP1
    models: tuple[str, ...]  # checkpoint folders; each epoch refits them all in turn
    epochs: tuple[Epoch, ...]  # the ways the weights travel, one after another between the same models


TRAIN_RANKS = GEN_RANKS = 2


def epochs(folder: Path, *ways: tuple[str, str], host: str = "127.0.0.1") -> tuple[Epoch, ...]:
    """Epochs over the given (engine, transport) pairs; ``folder`` is theirs alone."""
    folder.mkdir()
    return tuple(Epoch(*way, folder, index, host) for index, way in enumerate(ways))


def run_scenarios(scenarios: Sequence[Scenario]) -> list[tuple[list[Any], list[Any]]]:
    """What the trainer ranks and the generation ranks report of each scenario; one after another, in the same processes."""
    return run_sides(trainer, TRAIN_RANKS, engine, GEN_RANKS, scenarios)


def trainer(rank: int, scenarios: Sequence[Scenario]) -> list[list[dict[str, Any]]]:
    from megatron.core import parallel_state

    reports = []
    for scenario in scenarios:
        reports.append(_train(rank, scenario))
        parallel_state.destroy_model_parallel()
    return reports


def _train(rank: int, scenario: Scenario) -> list[dict[str, Any]]:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(scenario.models[0], MegatronLayout(**scenario.layout))
    live = [parameter.detach() for chunk in built.model for parameter in chunk.parameters()]
    trained = []
    for path in scenario.models:
        type(built.bridge).from_hf_pretrained(path).load_hf_weights(built.model)
        trained.append([parameter.clone() for parameter in live])

    class Trainer(MegatronRefitMixin):
        def __init__(self, config: RefitConfig):
            self.model, self.bridge, self.refit_config = built.model, built.bridge, config

    reports = []
    for epoch in scenario.epochs:
        worker = Trainer(RefitConfig(**epoch.config()))
        prepared = worker.prepare_nccl_xfer_refit_info()
        if rank == 0:
            rendezvous = worker.open_refit_rendezvous(epoch.host, TRAIN_RANKS, GEN_RANKS)
            tell_meeting(epoch.folder, rendezvous, epoch.index)
        manifest = worker.join_refit(epoch.meet(), rank, epoch.engine)
        records = []
        for version, index in enumerate(_order(scenario)):
            for parameter, values in zip(live, trained[index], strict=True):
                parameter.copy_(values)
            is_shards = epoch.engine == "nccl_xfer"
            send = worker.nccl_xfer_refit if is_shards else worker.broadcast_weights_for_collective
            records.append(send(version))
        worker.close_refit()
        reports.append({"prepared": prepared, "manifest": manifest, "records": records})
    return reports


def engine(rank: int, scenarios: Sequence[Scenario]) -> list[list[dict[str, Any]]]:
    return [_serve(rank, scenario) for scenario in scenarios]


def _serve(rank: int, scenario: Scenario) -> list[dict[str, Any]]:
    import torch

    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    worker = TransformersEngine(scenario.models[0], torch.bfloat16, scenario.gen_tp)
    # The oracle: what transformers' own loader makes of each checkpoint.
    oracle = [
        TransformersEngine(path, torch.bfloat16, scenario.gen_tp).model.state_dict()
        for path in scenario.models
    ]
    reports = []
    for epoch in scenario.epochs:
        worker.join_refit(epoch.meet(), TRAIN_RANKS + rank, epoch.config(), epoch.engine)
        records, wrong = [], []
        for version, index in enumerate(_order(scenario)):
            for parameter in worker.model.parameters():
                parameter.fill_(float("nan"))
            is_shards = epoch.engine == "nccl_xfer"
            receive = worker.nccl_xfer_refit if is_shards else worker.update_weights_from_collective
            records.append(receive(version))
            state = worker.model.state_dict()
            wrong += [f"v{version} {n}" for n, t in oracle[index].items() if not torch.equal(t, state[n])]
        reports.append({"records": records, "wrong": wrong, "version": worker.refit_state.version})
        worker.close_refit()
    return reports


def _order(scenario: Scenario) -> list[int]:
    """Never the same weights twice in a row, so that a refit that does nothing can't pass."""
    return [*range(1, len(scenario.models)), 0]
