"""The trainer's ranks as Ray actors, each with its part of a policy that inherits the refit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from ...integration.colocated.memory import ProcessMemory
from ...integration.config import RefitConfig
from ...workers.ray_host import node_address
from ..config.schema import TrainConfig
from ..run.cluster import ActorGroup, gather
from ..run.rank import RankActor, join_worlds
from .base import PolicyBatch, PolicyConfig
from .make import refitting_policy
from .state import Files


class TrainerActor(RankActor):
    """One trainer rank."""

    def build(self, config: PolicyConfig, refit_config: RefitConfig, colocated: bool) -> None:
        """Build the model and load the checkpoint's weights."""
        self._policy = refitting_policy(config, refit_config)
        if colocated:
            self._memory = self._policy.colocated_rank()

    def compute_logprobs(self, batch: PolicyBatch) -> np.ndarray | None:
        return _from_rank_0(self._policy.compute_logprobs(batch))

    def compute_reference_logprobs(self, batch: PolicyBatch) -> np.ndarray | None:
        return _from_rank_0(self._policy.compute_reference_logprobs(batch))

    def train_step(self, batch: PolicyBatch) -> dict[str, float]:
        return self._policy.train_step(batch)

    def calibrate_kv_scales(self, batch: PolicyBatch, margin: float) -> dict[str, float]:
        return self._policy.calibrate_kv_scales(lambda: self._policy.compute_logprobs(batch), margin=margin)

    def calibrate_inputs(self, batch: PolicyBatch) -> None:
        self._policy.calibrate_inputs(batch)

    def save(self, folder: str) -> Files:
        return self._policy.save(folder)

    def load(self, folder: str) -> None:
        self._policy.load(folder)

    def open_refit_rendezvous(self, train_ranks: int, gen_ranks: int) -> dict[str, Any]:
        return self._policy.open_refit_rendezvous(node_address(), train_ranks, gen_ranks)

    def join_refit(self, rendezvous: dict[str, Any], rank: int, engine: str) -> dict[str, Any]:
        return self._policy.join_refit(rendezvous, rank, engine)

    def refit(self, version: int, kv_scales: dict[str, float] | None) -> dict[str, Any]:
        return self._policy.refit(version, kv_scales)

    def onload(self) -> None:
        self._memory.onload()

    def offload(self) -> None:
        self._memory.offload()

    def free(self) -> None:
        self._memory.free()

    def empty_cache(self) -> None:
        self._memory.empty_cache()

    def memory(self, restart: bool) -> list[ProcessMemory]:
        return self._memory.memory(restart)


class TrainerGroup:
    """All trainer ranks; batches go to every rank, which takes its data-parallel part."""

    def __init__(self, config: TrainConfig, policy: PolicyConfig, gpus: int) -> None:
        self._timeout_s = config.ray.timeout_s
        colocated = config.generation.colocated.enabled
        self._group = ActorGroup(
            "trainer",
            TrainerActor,
            config.trainer.ranks,
            gpus,
            config.ray,
            env=config.ray.trainer_env,
            guest_cpus=config.ray.cpus_per_rank if colocated else 0.0,
        )
        # Ranks write their parts of checkpoints there.
        self._folder = config.folder.absolute()
        self._build_arguments = (policy, config.policy.refit, colocated)

    def start(self) -> None:
        """Make the ranks' world and begin to build the models.

        Raises:
            RunError: a rank failed, or its host does not have the model's or the run's folder; names it.
        """
        self._group.require_model(self._build_arguments[0].model_path)
        self._group.require_files("run_root", self._folder)
        join_worlds(self._group, self.ranks, self._timeout_s, always=True)
        self._building = self._group.submit("build", *self._build_arguments)

    def wait_until_built(self) -> None:
        """Wait for the models, whose building began with :meth:`start`."""
        gather(self._building, self._timeout_s)

    @property
    def actors(self) -> ActorGroup:
        """The ranks' actors, beside which engines may be placed."""
        return self._group

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of :class:`TrainerActor` on all ranks."""
        return self._group.call(method, *arguments)

    def submit(self, method: str, *arguments: Any) -> list[tuple[str, ray.ObjectRef]]:
        """The same without waiting."""
        return self._group.submit(method, *arguments)

    @property
    def ranks(self) -> int:
        return len(self._group)

    def compute_logprobs(self, batch: PolicyBatch) -> torch.Tensor:
        """``[N, S]`` float32 under the present weights."""
        return _tensor(self._group.call("compute_logprobs", batch)[0])

    def compute_reference_logprobs(self, batch: PolicyBatch) -> torch.Tensor:
        """The same under the reference policy."""
        return _tensor(self._group.call("compute_reference_logprobs", batch)[0])

    def train_step(self, batch: PolicyBatch) -> dict[str, float]:
        """One optimizer step; metrics of the whole batch."""
        return self._group.call("train_step", batch)[0]

    def calibrate_kv_scales(self, batch: PolicyBatch, margin: float) -> dict[str, float]:
        """Scales of an FP8 KV cache for the batch under the present weights, with room for ``margin`` times its values."""
        return self._group.call("calibrate_kv_scales", batch, margin)[0]

    def calibrate_inputs(self, batch: PolicyBatch) -> None:
        """Scales of what goes into the layers of a policy in W4A4, for the batch under the present weights."""
        self._group.call("calibrate_inputs", batch)

    def save(self, folder: Path) -> Files:
        """Every rank writes its state into ``folder``, which all nodes must reach; what they wrote."""
        saved: list[Files] = self._group.call("save", str(folder.absolute()))
        return {name: written for files in saved for name, written in files.items()}

    def load(self, folder: Path) -> None:
        self._group.call("load", str(folder.absolute()))

    def open_refit_rendezvous(self, gen_ranks: int) -> dict[str, Any]:
        """Open the meeting point on rank 0."""
        call = self._group.actors[0].open_refit_rendezvous.remote(self.ranks, gen_ranks)
        return gather([("trainer rank 0", call)], self._timeout_s)[0]

    def submit_join_refit(self, rendezvous: dict[str, Any], engine: str) -> list[tuple[str, ray.ObjectRef]]:
        return self._group.submit_each(
            "join_refit", [(rendezvous, rank, engine) for rank in range(self.ranks)]
        )

    def submit_refit(
        self, version: int, kv_scales: dict[str, float] | None = None
    ) -> list[tuple[str, ray.ObjectRef]]:
        return self._group.submit("refit", version, kv_scales)

    def shutdown(self) -> None:
        self._group.shutdown()


def _from_rank_0(logprobs: torch.Tensor) -> np.ndarray | None:
    """The whole batch's log-probabilities, which all ranks have, once: as many gigabytes as ranks would pass Ray.

    An array and not a tensor: Megatron patches how torch pickles storages, and the driver would have to import
    Megatron to read it.
    """
    return logprobs.numpy() if dist.get_rank() == 0 else None


def _tensor(array: np.ndarray) -> torch.Tensor:
    # Ray's arrays are read-only views of its object store.
    return torch.from_numpy(array.copy())
