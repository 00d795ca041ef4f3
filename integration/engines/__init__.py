"""Checkpoint engines and their registry."""

from .base import CheckpointEngine, SendResult, make_engine, register_engine
from .nccl_xfer import NcclXferEngine
from .packed_broadcast import PackedBroadcastEngine

register_engine("nccl_xfer", NcclXferEngine)
register_engine("packed_broadcast", PackedBroadcastEngine)

__all__ = [
    "CheckpointEngine",
    "NcclXferEngine",
    "PackedBroadcastEngine",
    "SendResult",
    "make_engine",
    "register_engine",
]
