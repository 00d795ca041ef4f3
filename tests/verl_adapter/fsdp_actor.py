"""verl's own actor worker with its FSDP2 engine, on CPUs."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker


class Actor(ActorRolloutRefWorker):
    """As verl made it; its weights can be changed without training.

    Attributes:
        TRAINING: verl's settings of such an actor.
    """

    TRAINING = (
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, version: int) -> None:
        """Give each weight values that belong to the version, in place, as an optimizer would."""
        with torch.no_grad():
            for name, parameter in self.actor.engine.module.named_parameters():
                assert isinstance(parameter, DTensor)
                whole = weight(name, parameter.shape, version).to(parameter.device_mesh.device_type)
                shard = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(shard.to_local())


# Versions of which the elements are those of the version before, but for 2%.
SPARSE = (3, 4, 5)


def weight(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """A whole weight of a version, in FP32."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {version}".encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator) * 0.02
    if version not in SPARSE:
        return drawn
    changes = torch.rand(tuple(shape), generator=generator) < 0.02
    return torch.where(changes, drawn, weight(name, shape, version - 1))
