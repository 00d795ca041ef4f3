"""The trainer's side: a live Megatron-core model with random weights, and a world of its ranks."""

from __future__ import annotations

import os
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ....integration.config import RefitConfig
from ....workers.trainers.megatron.mixin import MegatronRefitMixin
from ....workers.trainers.megatron.model import build_megatron
from ....workers.trainers.megatron.source import MegatronSource
from ..options import DTYPES, LiveOptions
from ..ranks import Ranks
from .memory import Memory, memory, restart_peak

_HOST = "127.0.0.1"


class TrainerRanks(Ranks):
    """All trainer ranks: a world for Megatron, and a group of hosts for the benchmark."""

    def __init__(self, rank: int, options: LiveOptions, store: TCPStore):
        """Meet the others; all ranks do so at the same time."""
        # Libraries read these beside the arguments of init_process_group.
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(options.world_size),
            MASTER_ADDR=_HOST,
            MASTER_PORT=str(store.port),
        )
        agree_with_engine(options.backend)
        on_gpu = options.device == "cuda"
        super().__init__(rank, options.world_size, rank if on_gpu else None)
        timeout = timedelta(seconds=options.timeout_s)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("live", store),
            rank=rank,
            world_size=self.size,
            timeout=timeout,
        )
        self._hosts = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which has the engine."""
        return self.rank == 0

    def memory(self, *, restart: bool = False) -> Memory:
        """This rank's memory; ``restart`` lets the peak count anew from here."""
        self.synchronize()
        if restart:
            restart_peak(self.device)
        return memory(self.device)


def agree_with_engine(backend: str) -> None:
    """Members of one communicator have to agree on these, which SGLang sets in its processes where nobody did."""
    if backend == "sglang":
        for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
            os.environ.setdefault(name, "0")


class LiveTrainer(MegatronRefitMixin):
    """A trainer's worker with everything but the training.

    Attributes:
        number: of the weights that the model has now; 0 at first.
    """

    def __init__(self, folder: Path, options: LiveOptions):
        """Build this rank's part of the model, on its device, with random weights; all ranks do so together."""
        built = build_megatron(
            folder,
            options.megatron_layout(),
            dtype=DTYPES[options.dtype],
            seed=options.world_size,
            wrap_with_ddp=False,
            load_weights=False,
        )
        self.model, self.bridge = built.model, built.bridge
        self.refit_config = RefitConfig()
        self.number = 0
        self._spread_norms()

    @property
    def source(self) -> MegatronSource:
        """The model as a source of weights, as the refit sees it."""
        source = self._prepared_source()
        assert isinstance(source, MegatronSource), "the mixin of Megatron's workers makes it"
        return source

    def change_weights(self, number: int) -> None:
        """Give the model weights ``number``: every parameter's elements, moved round by one place for each number.

        Any number's weights can be had again exactly, from any other's, and stay as random weights are. Ranks
        that hold copies of a parameter do the same to them.
        """
        shift, self.number = number - self.number, number
        with torch.no_grad():
            for chunk in self.model:
                for parameter in chunk.parameters():
                    parameter.copy_(torch.roll(parameter, shift))

    def _spread_norms(self) -> None:
        """Vectors begin as ones or zeros, all alike; moved round they would not change."""
        with torch.no_grad():
            for chunk in self.model:
                for name, parameter in chunk.named_parameters():
                    if parameter.dim() == 1:
                        # Equal on all ranks that may hold copies.
                        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                        noise = torch.randn(parameter.shape, generator=generator)
                        parameter.add_(0.1 * noise.to(parameter.device, parameter.dtype))
