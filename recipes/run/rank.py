"""What every rank's actor does first: find its address, and join its group's ``torch.distributed`` world."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

from ...integration.control.address import joined
from ...workers.ray_host import node_address
from .cluster import ActorGroup, HostActor, RunError, free_port, gather


class RankActor(HostActor):
    """Base of the actors that are ranks of a ``torch.distributed`` world."""

    def address(self) -> tuple[str, int]:
        """Address of this node as other nodes reach it, and a free port."""
        return node_address(), free_port()

    def visible_gpus(self) -> str:
        """``CUDA_VISIBLE_DEVICES`` as Ray has set it for this actor, which has a GPU."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def join(self, rank: int, size: int, host: str, port: int, timeout_s: float, local_world: bool) -> None:
        """Initialise ``torch.distributed``: NCCL where this actor has a GPU, else gloo.

        Args:
            rank: rank in the group.
            size: ranks of the group.
            host: address of the group's rank 0.
            port: port on it.
            timeout_s: limit of a collective, in seconds.
            local_world: whether to make a world at all; a group of one rank may do without.
        """
        import torch
        import torch.distributed as dist

        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(name)s rank {rank}: %(message)s")
        if interface := interface_of(node_address()):
            # Else gloo takes the address of the host's name, which may lead nowhere, or to a network that other hosts don't have.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Libraries read these beside the arguments of init_process_group.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port)
        )
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        else:
            torch.set_num_threads(1)
        if local_world:
            dist.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo",
                init_method=f"tcp://{joined(host, port)}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )


def interface_of(address: str) -> str:
    """The network interface of this host that has an address; empty if none has."""
    import psutil  # which Ray brings along, and has on the path once it is loaded

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


def join_worlds(group: ActorGroup, size: int, timeout_s: float, *, always: bool) -> None:
    """Make the group's actors into worlds of ``size`` consecutive ranks each.

    Args:
        group: actors of :class:`RankActor`'s kind, a multiple of ``size`` many.
        size: ranks of one world.
        timeout_s: limit of a collective and of this call, in seconds.
        always: make a ``torch.distributed`` world also of a single rank.
    """
    if len(group) % size:
        raise RunError(f"{len(group)} {group.name} ranks can't be cut into worlds of {size}")
    addresses = group.call("address")
    arguments = [
        (rank % size, size, *addresses[rank - rank % size], timeout_s, always or size > 1)
        for rank in range(len(group))
    ]
    gather(group.submit_each("join", arguments), timeout_s)
