"""What ``rlrefit bench`` was asked for, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from .run_options import RunOptions

PEERS = ("broadcast", "per-tensor", "vllm", "m2n")


@dataclass(frozen=True)
class BenchOptions(RunOptions):
    """One run; its transports' first three refits and last one are checked.

    Attributes:
        quantize: ``fp8`` for engines that hold linear layers in blocks of FP8, which the trainers make; or ``off``.
        check: compare what landed with the true values, bit for bit.
        timeline: keep every stage's intervals of one refit.
        probe_bytes: message size of the pairwise p2p rate.
    """

    PEERS = PEERS

    peers: tuple[str, ...] = PEERS
    refits: int = 20
    warm_up: int = 3
    peer_refits: int = 5
    timeout_s: float = 300.0
    quantize: str = "off"
    check: bool = True
    timeline: bool = False
    probe_bytes: int = 2 << 30

    @property
    def is_quantized(self) -> bool:
        return self.quantize == "fp8"

    @property
    def train_ranks(self) -> int:
        """Trainer ranks."""
        return int(self.train.world_size)

    @property
    def world_size(self) -> int:
        """Ranks on both sides: one process each, and on GPUs one GPU each."""
        return self.train_ranks + self.gen_ranks

    def violations(self, gpus: int) -> list[str]:
        """All that is wrong, one sentence each with the remedy; empty if nothing is.

        Args:
            gpus: GPUs of this host.
        """
        found = self.common_violations()
        if self.is_quantized and self.dtype == "fp32":
            found.append("--quantize: fp8 is made of bf16 or fp16; give --dtype bf16")
        if self.device == "cuda" and self.world_size > gpus:
            found.append(
                f"{self.train_ranks} trainer and {self.gen_ranks} engine ranks need {self.world_size} GPUs, and this "
                f"host has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found
