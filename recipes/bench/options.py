"""What ``rlrefit bench`` was asked for, checked before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...integration.config import TRANSPORTS, RefitConfig
from ...workers.catalog import GenLayout, TrainLayout
from ..option_checks import refit_problems

PEERS = ("broadcast", "per-tensor", "vllm", "m2n")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BenchOptions:
    """One run of the benchmark.

    Attributes:
        model: a name, path or hub name that the catalogue opens.
        train: layout of the trainers.
        gen: layout of the engines.
        train_text: the layout as the user wrote it.
        gen_text: likewise.
        transports: what to time, in order.
        peers: other ways to move the same weights, timed in the same run.
        dtype: of the weights, a key of ``DTYPES``.
        refits: timed refits for each transport.
        warm_up: refits before them; the first three are checked.
        peer_refits: timed runs of each peer, after one that is checked.
        bucket_mb: ``policy.refit.bucket_mb``; None leaves the default.
        streams: ``policy.refit.streams``; None leaves the default.
        layers: decoder layers to keep of the model; None keeps all.
        verify: ``policy.refit.verify``.
        check: compare what landed with the true values, bit for bit.
        timeline: keep every stage's intervals of one refit.
        device: ``cuda`` or ``cpu``.
        probe_bytes: message size of the pairwise p2p rate.
        timeout_s: limit of any wait, in seconds.
    """

    model: str
    train: TrainLayout
    gen: GenLayout
    train_text: str
    gen_text: str
    transports: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = PEERS
    dtype: str = "bf16"
    refits: int = 20
    warm_up: int = 3
    peer_refits: int = 5
    bucket_mb: int | None = None
    streams: int | None = None
    layers: int | None = None
    verify: str = RefitConfig().verify
    check: bool = True
    timeline: bool = False
    device: str = "cuda"
    probe_bytes: int = 2 << 30
    timeout_s: float = 300.0

    @property
    def train_ranks(self) -> int:
        """Trainer ranks."""
        return int(self.train.world_size)

    @property
    def gen_ranks(self) -> int:
        """Engine ranks, over all replicas."""
        return int(self.gen.world_size)

    @property
    def world_size(self) -> int:
        """Ranks on both sides: one process each, and on GPUs one GPU each."""
        return self.train_ranks + self.gen_ranks

    def refit_config(self, transport: str) -> RefitConfig:
        """``policy.refit`` of the run, with one of its transports."""
        config = RefitConfig(transport=transport, timeout_s=self.timeout_s, verify=self.verify)
        if self.bucket_mb is not None:
            config.bucket_mb = self.bucket_mb
        if self.streams is not None:
            config.streams = self.streams
        return config

    def violations(self, gpus: int) -> list[str]:
        """All that is wrong, one sentence each with the remedy; empty if nothing is.

        Args:
            gpus: GPUs of this host.
        """
        found = [
            text
            for transport in self.transports or (RefitConfig().transport,)
            for text in refit_problems(self.refit_config(transport))
        ]
        found = list(dict.fromkeys(found))
        if not self.transports:
            found.append(f"--transport: give at least one of {', '.join(TRANSPORTS)}")
        found += [
            f"--peers: {name!r} is not one of {', '.join(PEERS)} or none"
            for name in self.peers
            if name not in PEERS
        ]
        if self.dtype not in DTYPES:
            found.append(f"--dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for option, value, least in (
            ("--refits", self.refits, 1),
            ("--warm-up", self.warm_up, 1),
            ("--peer-refits", self.peer_refits, 1),
            ("--layers", self.layers, 1),
        ):
            if value is not None and value < least:
                found.append(f"{option}: {value} is too small; give at least {least}")
        if self.device == "cpu" and "ipc" in self.transports:
            found.append("--transport: ipc needs GPUs; with --device cpu give auto, p2p or golden")
        if self.device == "cuda" and self.world_size > gpus:
            found.append(
                f"{self.train_ranks} trainer and {self.gen_ranks} engine ranks need {self.world_size} GPUs, and this "
                f"host has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found


def names_of(values: Sequence[str]) -> tuple[str, ...]:
    """Names from options that may be repeated and may hold several, set apart by commas."""
    return tuple(dict.fromkeys(name for value in values for name in value.split(",") if name))
