"""Checkpoint engines and their registry."""

from .base import CheckpointEngine, SendResult, make_engine, register_engine
from .colocated_ipc import ColocatedIpcEngine
from .nccl_xfer import NcclXferEngine
from .packed_broadcast import PackedBroadcastEngine

register_engine("nccl_xfer", NcclXferEngine)
register_engine("colocated_ipc", ColocatedIpcEngine)
register_engine("packed_broadcast", PackedBroadcastEngine)

__all__ = [
    "CheckpointEngine",
    "ColocatedIpcEngine",
    "NcclXferEngine",
    "PackedBroadcastEngine",
    "SendResult",
    "make_engine",
    "register_engine",
]
