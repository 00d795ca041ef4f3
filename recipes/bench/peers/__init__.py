"""Other ways to move the same weights, timed beside the refit."""

from __future__ import annotations

from .base import Peer
from .broadcast import PackedBroadcastPeer
from .per_tensor import PerTensorPeer
from .vllm_engine import VllmPeer

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (PackedBroadcastPeer, PerTensorPeer, VllmPeer)}

__all__ = ["PEERS", "Peer"]
