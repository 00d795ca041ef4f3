"""``colocated_ipc``: shard to shard inside a host, between processes that NCCL would not join on one GPU."""

from __future__ import annotations

from ..comm.shared.opening import agree_on_wire
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld, host_identity
from ..errors import RefitError
from ..weights.endpoints import WeightDestination, WeightSource
from ..weights.manifest import Manifest
from .nccl_xfer import NcclXferEngine


class ColocatedIpcEngine(NcclXferEngine):
    """As ``nccl_xfer``, over the ranks' shared memory.

    Weights go straight into the engines' parameters where those can be mapped (``ipc``), and else through buckets
    (CUDA IPC, or host memory), as the misc path does. Pools without shareable handles, as vLLM's sleep mode may have, so
    cost two buckets for each direction and stream, and no copy of the model.
    """

    name = "colocated_ipc"

    def __init__(self, config: RefitConfig, world: RefitWorld, channel: Channel):
        super().__init__(config, world, channel)
        channel.shared_wire = True

    def prepare(self, endpoint: WeightSource | WeightDestination) -> Manifest:
        hosts = self.channel.vote("host", host_identity())
        away = [self.world.describe(rank) for rank, host in enumerate(hosts) if host != hosts[0]]
        if away:
            raise RefitError(
                f"colocated_ipc joins the processes of one host, and {', '.join(away)} is not on trainer rank 0's; nothing "
                "was written. Use the engine nccl_xfer, or a refit world for each host",
                stage="handshake",
                rank=self.world.rank,
            )
        manifest = super().prepare(endpoint)
        self._wire = agree_on_wire(self.channel, "engine", endpoint.device)
        return manifest

    @property
    def transport_name(self) -> str:
        """``ipc``, ``buckets``, or ``golden``."""
        name = super().transport_name
        return "buckets" if name == "p2p" else name

    @property
    def transport_reason(self) -> str:
        reason = super().transport_reason
        if self.transport_name == "ipc":
            return reason
        # Two ranks of one GPU are told of already.
        return f"{reason}; {self._wire.how if self._wire.why in reason else self._wire.reason}"

    @property
    def held_bytes(self) -> int:
        """With the misc path's buckets; the bulk path counts its own."""
        return super().held_bytes + (self._misc_group.staging_bytes if self._misc_group is not None else 0)
