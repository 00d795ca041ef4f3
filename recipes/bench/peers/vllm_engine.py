"""vLLM's own packed NCCL weight transfer (``vllm.distributed.weight_transfer``), where a CUDA build of vLLM is installed."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ....integration.weights.manifest import dtype_name
from ..gather import Gather, gather_units
from ..scene import Scene
from ..storage import BenchDestination
from .base import Peer

_MODULE = "vllm.distributed.weight_transfer.nccl_engine"


class VllmPeer(Peer):
    """Gathers as the broadcast peer does; packing, broadcast and unpacking are vLLM's."""

    name = "vllm"

    @staticmethod
    def unavailable(scene: Scene) -> str:
        if scene.ranks.device.type != "cuda":
            return "vLLM's weight transfer needs GPUs"
        try:
            engine = importlib.import_module(_MODULE).NCCLWeightTransferEngine
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            return f"vLLM's NCCL weight transfer engine can't be imported ({error}); install a CUDA build of vLLM"
        if not hasattr(engine, "trainer_init") or not hasattr(engine, "trainer_send_weights"):
            return "this vLLM's NCCL weight transfer engine has another interface than 0.21's"
        return ""

    def __init__(self, scene: Scene):
        self._scene = scene
        ranks = scene.ranks
        module: Any = importlib.import_module(_MODULE)
        self._engine_class = module.NCCLWeightTransferEngine
        units = gather_units(scene.wanted_specs, scene.held, pair_experts=True)
        self._gather = Gather(units, ranks, scene.storage)
        members = 1 + len(ranks.engines)
        meeting = {"master_address": "127.0.0.1", "master_port": ranks.share(_free_port())}
        self._group: Any = None
        self._engine: Any = None
        if ranks.rank == 0:
            self._group = self._engine_class.trainer_init({**meeting, "world_size": members})
        elif not ranks.is_source:
            place = SimpleNamespace(
                data_parallel_index=0, world_size=members - 1, rank=ranks.rank - ranks.train_ranks
            )
            self._engine = self._engine_class(None, place)
            self._engine.init_transfer_engine(
                module.NCCLWeightTransferInitInfo(**meeting, rank_offset=1, world_size=members)
            )
            specs = [spec for unit in units for spec in unit.specs]
            self._update = module.NCCLWeightTransferUpdateInfo(
                names=[spec.name for spec in specs],
                dtype_names=[dtype_name(spec.dtype) for spec in specs],
                shapes=[list(spec.shape) for spec in specs],
                packed=True,
            )

    def run(self) -> None:
        if self._engine is not None:
            endpoint = self._scene.endpoint
            assert isinstance(endpoint, BenchDestination), "only engine ranks have vLLM's engine"
            self._engine.receive_weights(self._update, endpoint.quantize_and_load)
        elif self._group is not None:
            self._engine_class.trainer_send_weights(
                self._gather.full(), {"group": self._group, "packed": True}
            )
        else:
            _drain(self._gather.full())

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        self._group = None


def _drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
