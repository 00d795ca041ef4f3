"""What ``rlrefit bench`` and ``rlrefit bench-live`` are both asked for, and what can be wrong with it."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...integration.config import TRANSPORTS, RefitConfig
from ..config.options import refit_problems
from ..plan.catalog import FsdpLayout, GenLayout, TrainLayout, parse_gen, parse_train

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class RunOptions(ABC):
    """One run of a benchmark.

    Attributes:
        model: a name, path or hub name that the catalogue opens.
        train: layout of the trainers.
        gen: layout of the engines.
        train_text: the layout as the user wrote it.
        gen_text: likewise.
        transports: what to time, in order.
        peers: other ways to move the same weights, timed in the same run, in order.
        dtype: of the weights, a key of ``DTYPES``.
        refits: timed refits for each transport.
        warm_up: refits before them.
        peer_refits: timed runs of each peer, after one that warms up.
        bucket_mb: ``policy.refit.bucket_mb``; None leaves the default.
        streams: ``policy.refit.streams``; None leaves the default.
        layers: decoder layers to keep of the model; None keeps all.
        verify: ``policy.refit.verify``.
        device: ``cuda`` or ``cpu``.
        timeout_s: limit of any wait, in seconds.
    """

    model: str
    train: TrainLayout | FsdpLayout
    gen: GenLayout
    train_text: str
    gen_text: str
    transports: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    dtype: str = "bf16"
    refits: int = 1
    warm_up: int = 1
    peer_refits: int = 1
    bucket_mb: int | None = None
    streams: int | None = None
    layers: int | None = None
    verify: str = RefitConfig().verify
    device: str = "cuda"
    timeout_s: float = RefitConfig().timeout_s

    @property
    @abstractmethod
    def known_peers(self) -> tuple[str, ...]:
        """Names that ``--peers`` may have."""

    @property
    def cpu_transports(self) -> tuple[str, ...]:
        """What ``--transport`` may have without GPUs."""
        return "auto", "p2p", "golden"

    @property
    def is_quantized(self) -> bool:
        """Whether engines hold linear layers in blocks of FP8, which the trainers make."""
        return False

    @property
    def gen_ranks(self) -> int:
        """Engine ranks, over all replicas."""
        return int(self.gen.world_size)

    def refit_config(self, transport: str) -> RefitConfig:
        """``policy.refit`` of the run, with one of its transports."""
        config = RefitConfig.unchecked(
            transport=transport,
            timeout_s=self.timeout_s,
            verify=self.verify,
            trainer_quantize_fp8=self.is_quantized,
        )
        if self.bucket_mb is not None:
            config.bucket_mb = self.bucket_mb
        if self.streams is not None:
            config.streams = self.streams
        return config

    def common_violations(self) -> list[str]:
        """What is wrong with the attributes above, one sentence each with the remedy; empty if nothing is."""
        asked = self.transports or (RefitConfig().transport,)
        found = list(dict.fromkeys(p for name in asked for p in refit_problems(self.refit_config(name))))
        if not self.transports:
            found.append(f"--transport: give at least one of {', '.join(TRANSPORTS)}")
        found += [
            f"--peers: {name!r} is not one of {', '.join(self.known_peers)} or none"
            for name in self.peers
            if name not in self.known_peers
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
            *names, last = self.cpu_transports
            found.append(f"--transport: ipc needs GPUs; with --device cpu give {', '.join(names)} or {last}")
        return found


def common_options(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    """Attributes of :class:`RunOptions` as the command line has them.

    Args:
        arguments: of either command.
        peers: those that run where the user names none.

    Raises:
        LayoutError: a layout can't be read.
    """
    named = names_of(arguments.peers or [",".join(peers)])
    same = (
        "model", "dtype", "refits", "warm_up", "peer_refits", "bucket_mb", "streams", "layers", "verify", "device"
    )  # fmt: skip
    return {
        **{name: getattr(arguments, name) for name in same},
        "train": parse_train(arguments.train),
        "gen": parse_gen(arguments.gen),
        "train_text": arguments.train,
        "gen_text": arguments.gen,
        "transports": names_of(arguments.transport or ["auto"]),
        "peers": () if named == ("none",) else named,
    }


def names_of(values: Sequence[str]) -> tuple[str, ...]:
    """Names from options that may be repeated and may hold several, set apart by commas."""
    return tuple(dict.fromkeys(name for value in values for name in value.split(",") if name))
