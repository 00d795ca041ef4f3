"""NVIDIA's ``nccl.m2n``, one tensor at a time; what its meshes can't express goes as the per-tensor peer sends it."""

from __future__ import annotations

from dataclasses import replace

from ....integration.transport.m2n import M2nReshard, MeshTransfer, mesh_transfer, unavailable
from ....integration.transport.whole_tensors import whole_tensors
from ..scene import Scene
from .base import Peer, not_quantizing
from .per_tensor import PerTensorPeer


class M2nPeer(Peer):
    """``nccl.m2n`` where it applies."""

    name = "m2n"

    @staticmethod
    def unavailable(scene: Scene) -> str:
        return not_quantizing(scene) or unavailable(scene.ranks.device)

    def __init__(self, scene: Scene):
        tensors = whole_tensors(scene.wanted_specs, scene.held, scene.wanted)
        transfers: list[MeshTransfer] = []
        others: set[str] = set()
        for tensor in tensors:
            transfer = mesh_transfer(tensor)
            if isinstance(transfer, str):
                others.update(tensor.names)
            else:
                transfers.append(transfer)
        self._reshard = M2nReshard(
            transfers, scene.storage.by_name, scene.ranks.rank, scene.ranks.size, scene.ranks.share
        )
        self._rest = PerTensorPeer(replace(scene, specs=[s for s in scene.specs if s.name in others]))

    def run(self) -> None:
        self._reshard.run()
        self._rest.run()

    def close(self) -> None:
        self._rest.close()
        self._reshard.close()
