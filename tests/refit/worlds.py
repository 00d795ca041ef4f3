"""A trainer group and a generation group as two worlds of processes, meeting only through the refit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.spawn import free_port, run_ranks


@dataclass(frozen=True)
class Epoch:
    """One epoch of a scenario: how weights travel, and where the ranks meet."""

    engine: str
    transport: str
    port: int

    def config(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "bucket_mb": 1,
            "timeout_s": 120.0,
            "verify": "full",
            "port": self.port,
        }


@dataclass(frozen=True)
class Scenario:
    """A trainer that takes on ``models[1:]`` one after another, and engines that start from ``models[0]``.

    Attributes:
        layout: fields of ``MegatronLayout``.
        train_ranks: number of trainer ranks.
        gen_tp: tensor parallelism of an engine.
        replicas: number of engines.
        models: checkpoint folders; each epoch refits them all in turn, twice around.
        epochs: the ways the weights travel, one after another between the same processes.
    """

    layout: dict[str, int]
    train_ranks: int
    gen_tp: int
    replicas: int
    models: tuple[str, ...]
    epochs: tuple[Epoch, ...]


def epochs(*ways: tuple[str, str]) -> tuple[Epoch, ...]:
    """Epochs over the given (engine, transport) pairs, each with a port of its own."""
    return tuple(Epoch(engine, transport, free_port()) for engine, transport in ways)


def run_scenario(scenario: Scenario) -> tuple[list[Any], list[Any]]:
    """Run both worlds; returns what the trainer ranks and the generation ranks report."""
    groups: Sequence[tuple[Any, ...]] = [
        (trainer, scenario.train_ranks, scenario, 0),
        *(
            (engine, scenario.gen_tp, scenario, scenario.train_ranks + replica * scenario.gen_tp)
            for replica in range(scenario.replicas)
        ),
    ]
    with ThreadPoolExecutor(len(groups)) as pool:
        results = list(pool.map(lambda group: run_ranks(*group), groups))
    return results[0], [report for replica in results[1:] for report in replica]


def trainer(rank: int, scenario: Scenario, first: int) -> list[dict[str, Any]]:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.megatron.mixin import MegatronRefitMixin
    from rlrefit.workers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(scenario.models[0], MegatronLayout(**scenario.layout))
    bridges = [type(built.bridge).from_hf_pretrained(path) for path in scenario.models]

    class Trainer(MegatronRefitMixin):
        def __init__(self, config: RefitConfig):
            self.model, self.bridge, self.refit_config = built.model, built.bridge, config

    reports = []
    for epoch in scenario.epochs:
        worker = Trainer(RefitConfig(**epoch.config()))
        prepared = worker.prepare_nccl_xfer_refit_info()
        gen_ranks = scenario.gen_tp * scenario.replicas
        meeting = _meeting(epoch, scenario.train_ranks, gen_ranks)
        if rank == 0:
            worker.open_refit_rendezvous("127.0.0.1", scenario.train_ranks, gen_ranks)
        manifest = worker.init_per_pp_refit_comm_group(meeting, rank, epoch.engine)
        records = []
        for version, index in enumerate(_order(scenario)):
            bridges[index].load_hf_weights(built.model)
            send = (
                worker.nccl_xfer_refit
                if epoch.engine == "nccl_xfer"
                else worker.broadcast_weights_for_collective
            )
            records.append(send(version))
        worker.close_refit()
        reports.append({"prepared": prepared, "manifest": manifest, "records": records})
    return reports


def engine(rank: int, scenario: Scenario, first: int) -> list[dict[str, Any]]:
    import torch

    from rlrefit.workers.transformers_engine.engine import TransformersEngine

    worker = TransformersEngine(scenario.models[0], torch.bfloat16, scenario.gen_tp)
    # The oracle: what transformers' own loader makes of each checkpoint.
    oracle = [
        TransformersEngine(path, torch.bfloat16, scenario.gen_tp).model.state_dict()
        for path in scenario.models
    ]
    reports = []
    for epoch in scenario.epochs:
        meeting = _meeting(epoch, scenario.train_ranks, scenario.gen_tp * scenario.replicas)
        worker.init_per_pp_refit_comm_group(meeting, first + rank, epoch.config(), epoch.engine)
        records, wrong = [], []
        for version, index in enumerate(_order(scenario)):
            for parameter in worker.model.parameters():
                parameter.fill_(float("nan"))
            receive = (
                worker.nccl_xfer_refit
                if epoch.engine == "nccl_xfer"
                else worker.update_weights_from_collective
            )
            records.append(receive(version))
            state = worker.model.state_dict()
            wrong += [f"v{version} {n}" for n, t in oracle[index].items() if not torch.equal(t, state[n])]
        reports.append({"records": records, "wrong": wrong, "version": worker.refit_state.version})
        worker.close_refit()
    return reports


def _order(scenario: Scenario) -> list[int]:
    """Never the same weights twice in a row, so that a refit that does nothing can't pass."""
    return [*range(1, len(scenario.models)), *range(len(scenario.models))]


def _meeting(epoch: Epoch, train_ranks: int, gen_ranks: int) -> dict[str, Any]:
    from rlrefit.integration.channel import Rendezvous

    return Rendezvous("127.0.0.1", epoch.port, train_ranks, gen_ranks).to_json()
