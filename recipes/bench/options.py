"""What ``rlrefit bench`` was asked for, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from ...integration.config import RefitConfig
from .run_options import RunOptions

PEERS = ("broadcast", "per-tensor", "vllm", "m2n")
# Not a transport of ``policy.refit``: ``p2p`` of the engine ``colocated_ipc``.
BUCKETS = "buckets"


@dataclass(frozen=True)
class BenchOptions(RunOptions):
    """One run; its transports' first three refits and last one are checked.

    Attributes:
        quantize: ``fp8`` for engines that hold linear layers in blocks of FP8, which the trainers make; or ``off``.
        check: compare what landed with the true values, bit for bit.
        timeline: keep every stage's intervals of one refit.
        colocated: trainer rank i and engine rank i are two processes on one GPU.
        sleep: engines give the memory of their weights back between refits.
        probe_bytes: message size of the pairwise p2p rate, and of the device's copy rate.
    """

    peers: tuple[str, ...] = PEERS
    refits: int = 20
    warm_up: int = 3
    peer_refits: int = 5
    timeout_s: float = 300.0
    quantize: str = "off"
    check: bool = True
    timeline: bool = False
    colocated: bool = False
    sleep: bool = False
    probe_bytes: int = 2 << 30

    @property
    def known_peers(self) -> tuple[str, ...]:
        return PEERS

    @property
    def cpu_transports(self) -> tuple[str, ...]:
        return *super().cpu_transports, *((BUCKETS,) if self.colocated else ())

    @property
    def is_quantized(self) -> bool:
        return self.quantize == "fp8"

    @property
    def train_ranks(self) -> int:
        """Trainer ranks."""
        return int(self.train.world_size)

    @property
    def world_size(self) -> int:
        """Ranks on both sides: one process each, and on GPUs one GPU each or one for two."""
        return self.train_ranks + self.gen_ranks

    @property
    def gpus(self) -> int:
        """GPUs that a run on GPUs takes."""
        return self.train_ranks if self.colocated else self.world_size

    def gpu_of(self, rank: int) -> int:
        """Number of the GPU of ``rank``, trainers first."""
        return rank % self.gpus

    def refit_config(self, transport: str) -> RefitConfig:
        return super().refit_config("p2p" if transport == BUCKETS else transport)

    def engine(self, transport: str) -> str:
        """Name of the checkpoint engine that has a transport."""
        return "colocated_ipc" if transport == BUCKETS else "nccl_xfer"

    def violations(self, gpus: int) -> list[str]:
        """All that is wrong, one sentence each with the remedy; empty if nothing is.

        Args:
            gpus: GPUs of this host.
        """
        found = self.common_violations()
        if self.is_quantized and self.dtype == "fp32":
            found.append("--quantize: fp8 is made of bf16 or fp16; give --dtype bf16")
        if self.sleep and self.device != "cuda":
            found.append("--sleep: engines' memory is that of GPUs; leave --sleep or --device cpu out")
        found += self._sharing_violations()
        if self.device == "cuda" and self.gpus > gpus:
            found.append(
                f"{self.train_ranks} trainer and {self.gen_ranks} engine ranks need {self.gpus} GPUs, and this "
                f"host has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found

    def _sharing_violations(self) -> list[str]:
        """What is wrong for ranks that share GPUs, or for lack of it."""
        if not self.colocated:
            return (
                [
                    f"--transport: {BUCKETS} joins trainers and engines that share GPUs; give --colocated too, or p2p"
                ]
                if BUCKETS in self.transports
                else []
            )
        found = []
        if self.train_ranks != self.gen_ranks:
            found.append(
                f"--colocated: {self.train_ranks} trainer and {self.gen_ranks} engine ranks can't share GPUs one to one; "
                "give --train and --gen as many ranks"
            )
        if self.peers:
            found.append(
                f"--peers: {', '.join(self.peers)} can't run with --colocated: they go over NCCL, which takes no two ranks "
                "of one GPU; leave --peers out"
            )
        return found
