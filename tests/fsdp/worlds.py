"""A world of trainer ranks under FSDP2 and one of generation ranks, meeting only through the refit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.meeting import meeting_in, tell_meeting, wait_for
from tests.spawn import run_sides

from .ranks import Layout, adam_of, build, gathered, mesh_of, step

TRAIN_RANKS, GEN_RANKS, VERSIONS = 4, 2, 2


@dataclass(frozen=True)
class Case:
    """A trainer that takes steps, and engines that follow."""

    folder: Path
    checkpoint: str  # where both sides start from
    layout: Layout  # of the trainer; ranks beyond it stay out
    gen_tp: int  # the generation ranks are one engine of TP2 or two of TP1
    refit_dtype: torch.dtype | None
    ways: tuple[tuple[str, str], ...]  # the engine and transport of each epoch

    def saved(self, epoch: int, version: int) -> Path:
        """What transformers saves the trainer's model as."""
        return self.folder / f"epoch{epoch}-version{version}"


def run_cases(cases: Sequence[Case]) -> list[tuple[list[Any], list[Any]]]:
    """Run cases one after another in the same processes; for each, the reports of trainer and generation ranks."""
    return run_sides(train, TRAIN_RANKS, serve, GEN_RANKS, cases)


def train(rank: int, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    reports = []
    for case in cases:
        mesh = mesh_of(case.layout)
        reports.append(_train(rank, case, mesh) if rank < case.layout.ranks else [])
    return reports


def _train(rank: int, case: Case, mesh: Any) -> list[dict[str, Any]]:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin

    from .models import save_whole

    trained = build(case.checkpoint, case.layout, mesh)
    optimizer = adam_of(trained)

    class Trainer(FSDPRefitMixin):
        model = trained
        refit_dtype = case.refit_dtype

    reports = []
    for epoch, (engine, transport) in enumerate(case.ways):
        worker = Trainer()
        worker.refit_config = RefitConfig(**_config(transport))
        prepared = worker.prepare_nccl_xfer_refit_info()
        if rank == 0:
            rendezvous = worker.open_refit_rendezvous("127.0.0.1", case.layout.ranks, GEN_RANKS)
            tell_meeting(case.folder, rendezvous, epoch)
        manifest = worker.join_refit(meeting_in(case.folder, epoch), rank, engine)
        is_shards = engine == "nccl_xfer"
        send = worker.nccl_xfer_refit if is_shards else worker.broadcast_weights_for_collective
        records, wrong = [], []
        for version in range(VERSIONS):
            step(trained, optimizer, case.layout, mesh, 10 * epoch + version)
            records.append(send(version))  # first: what follows brings all parameters back to shards
            whole = gathered(trained, case.layout, mesh)
            exported = dict(worker._prepared_source().export(list(worker.prepare_refit_info())))
            if rank == 0:
                dtype = case.refit_dtype or case.layout.dtype
                saved = save_whole(case.checkpoint, whole, dtype, case.saved(epoch, version))
                case.saved(epoch, version).with_suffix(".done").touch()
                wrong += sorted(saved.keys() ^ exported.keys())
                wrong += [n for n in saved if not _same(saved[n], exported[n])]
        worker.close_refit()
        reports.append({"prepared": prepared, "manifest": manifest, "records": records, "wrong": wrong})
    return reports


def serve(rank: int, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    return [_serve(rank, case) for case in cases]


def _serve(rank: int, case: Case) -> list[dict[str, Any]]:
    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    worker = TransformersEngine(case.checkpoint, torch.bfloat16, case.gen_tp)
    reports = []
    for epoch, (engine, transport) in enumerate(case.ways):
        place = case.layout.ranks + rank
        worker.join_refit(meeting_in(case.folder, epoch), place, _config(transport), engine)
        is_shards = engine == "nccl_xfer"
        receive = worker.nccl_xfer_refit if is_shards else worker.update_weights_from_collective
        records, wrong = [], []
        for version in range(VERSIONS):
            for parameter in worker.model.parameters():
                parameter.fill_(float("nan"))
            records.append(receive(version))
            wait_for(case.saved(epoch, version).with_suffix(".done"))
            # The oracle: what transformers' own loader makes of what it saved itself.
            oracle = TransformersEngine(str(case.saved(epoch, version)), torch.bfloat16, case.gen_tp).model
            state = worker.model.state_dict()
            wrong += [f"v{version} {n}" for n, t in oracle.state_dict().items() if not _same(t, state[n])]
        reports.append({"records": records, "wrong": wrong, "version": worker.refit_state.version})
        worker.close_refit()
    return reports


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _config(transport: str) -> dict[str, Any]:
    return {"transport": transport, "bucket_mb": 1, "timeout_s": 120.0, "verify": "full"}
