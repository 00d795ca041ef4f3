"""An inference engine of your own takes the refit: say where its parameters stand in the checkpoint, inherit one mixin.

    torchrun --nproc-per-node 4 examples/own_engine.py     # CPUs; half a minute on two cores

Ranks 0 and 1 train a small network under FSDP2. Ranks 2 and 3 are an engine that cuts it as tensor parallelism does: the
first matrix by rows, the second by columns. After each step the engine computes what the trainer computes.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitMismatch
from rlrefit.integration.layout import Fragment
from rlrefit.integration.layout.boxes import box_of
from rlrefit.integration.weights.endpoints import storage_key
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin

TRAIN_RANKS, GEN_RANKS = 2, 2
WIDTH, INNER, STEPS = 16, 64, 3
REFIT = {"bucket_mb": 4, "timeout_s": 60.0, "verify": "full"}
# By name: the dimension that the engine's ranks share out, None for none.
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Trainer(FSDPRefitMixin):
    refit_config = RefitConfig(**REFIT)

    def __init__(self) -> None:
        torch.manual_seed(0)  # equal weights on both ranks, of which FSDP2 keeps each one's shard
        self.model = fully_shard(Network(), mesh=DeviceMesh("cpu", range(TRAIN_RANKS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Placement:
    """A rank's parameters as a ``WeightDestination``: which box of which weight each one is."""

    def __init__(self, parameters: dict[str, torch.Tensor], rank: int) -> None:
        self.parameters, self.rank = parameters, rank
        self.device = torch.device("cpu")
        self.kept_bytes = sum(p.nbytes for p in parameters.values())

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        if missing := self.parameters.keys() - {spec.name for spec in specs}:
            raise RefitMismatch(
                f"the trainer has no weight for {sorted(missing)}. Nothing was written; give both sides one model",
                stage="holdings",
            )
        # What is in the second answer, with a reason, goes through load_weights in place of shard to shard.
        return [self._fragment(spec) for spec in specs], {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, full in weights:
            whole = TensorSpec(name, tuple(full.shape), full.dtype)
            box = self._fragment(whole).box
            self.parameters[name].copy_(full[tuple(slice(*ends) for ends in box)])

    def finish(self, version: int) -> None:
        """Here caches would go that depend on weights."""

    def abandon(self) -> None:
        """Nothing is kept between a refit's calls."""

    def storage_key(self) -> Hashable:
        return storage_key(self.parameters.values())

    def _fragment(self, spec: TensorSpec) -> Fragment:
        box, dim = list(box_of(spec.shape)), CUT[spec.name]
        if dim is not None:
            each = spec.shape[dim] // GEN_RANKS
            box[dim] = (self.rank * each, (self.rank + 1) * each)
        return Fragment(spec.name, spec.shape, tuple(box), self.parameters[spec.name])


class Engine(DestinationRefitMixin):
    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
        each = INNER // GEN_RANKS
        shapes = {"up.weight": (each, WIDTH), "up.bias": (each,), "down.weight": (WIDTH, each)}
        self.parameters = {
            name: torch.full(shape, torch.nan) for name, shape in {**shapes, "down.bias": (WIDTH,)}.items()
        }

    def _make_refit_destination(self) -> Placement:
        return Placement(self.parameters, self.rank)

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        self.refit_state.require_clean()  # EngineDirty after a refit that failed on its way
        p = self.parameters
        out = torch.nn.functional.linear(x, p["up.weight"], p["up.bias"]).relu() @ p["down.weight"].T
        dist.all_reduce(out, group=self.group)
        return out + p["down.bias"]


def main() -> int:
    ranks = TRAIN_RANKS + GEN_RANKS
    if os.environ.get("WORLD_SIZE") != str(ranks):
        raise SystemExit(
            f"it takes {ranks} ranks of torchrun: torchrun --nproc-per-node {ranks} examples/own_engine.py"
        )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trains = rank < TRAIN_RANKS
    engines = dist.new_group(range(TRAIN_RANKS, TRAIN_RANKS + GEN_RANKS))
    worker = Trainer() if trains else Engine(rank - TRAIN_RANKS, engines)
    meeting = [worker.open_refit_rendezvous("127.0.0.1", TRAIN_RANKS, GEN_RANKS) if rank == 0 else None]
    dist.broadcast_object_list(meeting)
    worker.join_refit(meeting[0], rank) if trains else worker.join_refit(meeting[0], rank, REFIT)
    worst = 0.0
    for version in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(version))
        record = worker.refit(version)
        with torch.no_grad():
            there = worker.model(x) if trains else worker.infer(x)
        theirs = there.clone()
        dist.broadcast(theirs, 0)
        worst = max(worst, float((there - theirs).abs().max()))
        if trains:
            worker.step(x)
        if rank == TRAIN_RANKS:
            print(
                f"refit {version}: {record['bytes_bulk']:,} bytes shard to shard, outputs {worst:.0e} apart"
            )
    worker.close_refit()
    dist.destroy_process_group()
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
