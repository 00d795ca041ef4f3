"""NVIDIA's ``nccl.m2n`` as a transport: what it can move, its communicators, and a refit that it carries beside ``p2p``."""

from .carried import Carried, ReshardPlan, carry
from .library import Communicators, new_ids, unavailable
from .meshes import MeshSide, MeshTransfer, mesh_transfer
from .transport import M2nTransport

__all__ = [
    "Carried",
    "Communicators",
    "M2nTransport",
    "MeshSide",
    "MeshTransfer",
    "ReshardPlan",
    "carry",
    "mesh_transfer",
    "new_ids",
    "unavailable",
]
