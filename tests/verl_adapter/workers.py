"""Workers of a verl run on CPUs: verl's own classes, with weights of known values in place of models."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

from tests.odd_weights import SPECS, as_exported, bytes_of, weight, wrong


class Shards:
    """A training engine that keeps every second row, so that an export is a collective of both actors."""

    def __init__(self) -> None:
        self.version = 0
        self.exported = 0

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._export(), None

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in SPECS:
            whole = weight(name, self.version)
            raw = bytes_of(whole)
            mine = torch.zeros_like(raw)
            mine[dist.get_rank() :: 2] = raw[dist.get_rank() :: 2]
            dist.all_reduce(mine)
            self.exported += 1
            yield name, as_exported(mine.view(whole.dtype).view(whole.shape))


class Actor(Worker):
    """What verl's ActorRolloutRefWorker does for an update; its module loads all of verl's training engines."""

    def __init__(self, config: CheckpointEngineConfig, env: dict[str, str]) -> None:
        os.environ.update(env)
        super().__init__()
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.engine = Shards()
        import_external_libs(config.custom_backend_module)
        self._engine_config = config
        self.checkpoint_engine = self._made_engine()

    def _made_engine(self) -> Any:
        config = self._engine_config
        return CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        weights, _ = self.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, version: int) -> None:
        """Change all weights."""
        self.engine.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def adapt(self, merge: bool) -> None:
        """Have an adapter in the model's settings, and a checkpoint engine that has sent nothing yet."""
        self.actor = self.engine
        self.config = OmegaConf.create({"model": {"lora_rank": 8, "lora": {"merge": merge}}})
        self.checkpoint_engine = self._made_engine()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exported(self) -> int:
        return self.engine.exported


class KeptWeights(BaseRollout):
    """An inference engine that keeps what its loader is given, without a copy."""

    def __init__(self) -> None:
        self.replica_rank = 0
        self.weights: dict[str, torch.Tensor] = {}
        self.dies_at = ""

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        assert wire_format == "named_tensors"
        async for name, tensor in weights:
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.weights[name] = tensor

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError


class RolloutWorker(CheckpointEngineWorker):
    """verl's rollout worker before :class:`KeptWeights`."""

    def __init__(self, config: RolloutConfig, env: dict[str, str]) -> None:
        os.environ.update(env)
        super().__init__(config, None, KeptWeights())

    def wrong(self, version: int) -> list[str]:
        """What is not as it is at ``version``; the engine is empty afterwards."""
        found, self.server_adapter.weights = self.server_adapter.weights, {}
        return wrong(found, version)

    def die_at(self, name: str) -> None:
        self.server_adapter.dies_at = name

    def version(self) -> int | None:
        return self.checkpoint_engine.version


class Replica(RolloutReplica):
    """A replica of one worker, whose server does nothing but note what verl's manager asks of it."""

    def __init__(self, rank: int, config: RolloutConfig, worker: Any):
        super().__init__(rank, config, None)
        self.workers = [worker]
        self.asked: list[str] = []

    def get_ray_class_with_init_args(self) -> Any:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError

    async def abort_all_requests(self, **kwargs: Any) -> None:
        self.asked.append("abort")

    async def release_kv_cache(self) -> None:
        self.asked.append("release")

    async def resume_kv_cache(self) -> None:
        self.asked.append("restore")

    async def resume_generation(self) -> None:
        self.asked.append("resume")
