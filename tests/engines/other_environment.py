"""A trainer of two ranks under FSDP2 in another Python than the engine's: ``python -m tests.engines.other_environment FOLDER RANK CHECKPOINT…``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from tests.fp8_refits import differing
from tests.meeting import meeting_in, tell_meeting

from .contract import RANKS as ENGINE_RANKS
from .contract import TURNS, WAYS

RANKS = 2
CONFIG = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full", transport="p2p")
# By which the sides meet: within it the trainer's ranks meet each other, too.
_STORE = "trainer"


class _Trainer(FSDPRefitMixin):
    refit_config = CONFIG
    refit_dtype = torch.bfloat16

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self.model = fully_shard(_loaded(paths[0]))

    def take_on(self, index: int) -> None:
        """Hold the weights of a checkpoint, as a step of training would leave them."""
        new = dict(_loaded(self._paths[index]).named_parameters())
        with torch.no_grad():
            for name, held in self.model.named_parameters():
                assert isinstance(held, DTensor)
                held.copy_(distribute_tensor(new[name], held.device_mesh, held.placements))


def _loaded(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def send(folder: Path, rank: int, paths: list[str]) -> None:
    """Send every turn of every way, as the engine's ranks expect them."""
    store = dist.FileStore(str(folder / _STORE), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    trainer = _Trainer(paths)
    version = 0
    for epoch, way in enumerate(WAYS):
        if rank == 0:
            tell_meeting(
                folder, trainer.open_refit_rendezvous("127.0.0.1", RANKS, ENGINE_RANKS, epoch), epoch
            )
        trainer.join_refit(meeting_in(folder, epoch), rank, way)
        for index in TURNS:
            trainer.take_on(index)
            trainer.refit(version)
            version += 1
        trainer.close_refit()
    (folder / f"trainer{rank}.json").write_text(
        json.dumps({"torch": torch.__version__, "python": sys.version})
    )
    dist.destroy_process_group()


def follow(
    rank: int, engine_of: str, folder: str, paths: list[str]
) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """The engine's rank, ``vllm_rank`` or ``sglang_rank``: what differs after each refit into NaN from what the engine loads itself, and the
    misc weights by way."""
    engine = import_module(f"{__package__}.{engine_of}").begun(rank, paths)
    expected = [engine.loaded(index) for index in range(len(paths))]
    found: dict[str, list[str]] = {}
    misc: dict[str, set[str]] = {}
    version = 0
    for epoch, way in enumerate(WAYS):
        routes = engine.worker.join_refit(meeting_in(Path(folder), epoch), RANKS + rank, asdict(CONFIG), way)
        misc[way] = set(routes["misc_reasons"])
        for index in TURNS:
            engine.poison()
            engine.worker.refit(version)
            found[f"{way} {version}"] = differing(engine.held(), expected[index])
            version += 1
        engine.worker.close_refit()
    return found, misc


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    send(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
