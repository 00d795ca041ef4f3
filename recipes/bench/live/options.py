"""What ``rlrefit bench-live`` was asked for, checked before any process starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ....integration.config import TRANSPORTS, RefitConfig
from ....workers.catalog import GenLayout, TrainLayout
from ....workers.megatron.model import MegatronLayout
from ...option_checks import refit_problems
from ..options import DTYPES

PEERS = ("broadcast", "vllm")


@dataclass(frozen=True)
class LiveOptions:
    """One run.

    Attributes:
        model: a name, path or hub name that the catalogue opens.
        train: layout of the trainer.
        gen: layout of the engine.
        train_text: the layout as the user wrote it.
        gen_text: likewise.
        transports: of ``nccl_xfer``, in order.
        peers: other paths for the same weights, in order.
        dtype: of the weights, a key of ``DTYPES``.
        refits: timed refits for each transport.
        warm_up: refits before them.
        peer_refits: timed refits of each peer, after one that warms up.
        bucket_mb: ``policy.refit.bucket_mb``; None leaves the default.
        streams: ``policy.refit.streams``; None leaves the default.
        layers: decoder layers to keep of the model; None keeps all.
        verify: ``policy.refit.verify``.
        gpu_memory_utilization: vLLM's.
        engine_python: the engine's interpreter; None for this one.
        engine_pythonpath: the engine's PYTHONPATH; None leaves it.
        engine_log: file for the output of the engine's processes; None for a temporary one.
        json: file for the figures.
        device: ``cuda`` or ``cpu``.
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
    refits: int = 10
    warm_up: int = 2
    peer_refits: int = 3
    bucket_mb: int | None = None
    streams: int | None = None
    layers: int | None = None
    verify: str = RefitConfig().verify
    gpu_memory_utilization: float = 0.8
    engine_python: str | None = None
    engine_pythonpath: str | None = None
    engine_log: Path | None = None
    json: Path | None = None
    device: str = "cuda"
    timeout_s: float = 600.0

    @property
    def world_size(self) -> int:
        """Trainer ranks: the processes that this command starts itself; the engine starts its own."""
        return int(self.train.world_size)

    @property
    def gen_ranks(self) -> int:
        """Workers of the engine."""
        return int(self.gen.world_size)

    @property
    def last(self) -> int:
        """Number of the last refit of a transport, whose result is compared with the peers' as well."""
        return self.warm_up + self.refits

    def megatron_layout(self) -> MegatronLayout:
        """The trainer's layout in Megatron's terms."""
        return MegatronLayout(
            tensor_parallel=self.train.tp,
            pipeline_parallel=self.train.pp,
            virtual_pipeline=self.train.vpp if self.train.vpp > 1 else None,
            expert_parallel=self.train.ep,
            expert_tensor_parallel=self.train.etp,
            context_parallel=self.train.cp,
        )

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
        asked = self.transports or (RefitConfig().transport,)
        found = list(dict.fromkeys(p for name in asked for p in refit_problems(self.refit_config(name))))
        if not self.transports:
            found.append(f"--transport: give at least one of {', '.join(TRANSPORTS)}")
        found += [
            f"--peers: {n!r} is not one of {', '.join(PEERS)} or none" for n in self.peers if n not in PEERS
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
        if not 0 < self.gpu_memory_utilization <= 1:
            found.append(
                f"--gpu-memory-utilization: {self.gpu_memory_utilization} is not above 0 and at most 1"
            )
        if self.train.first is not None or self.train.last is not None or self.train.cp > 1:
            found.append(
                "--train: the live trainer is built with equal stages and cp=1; leave out first, last and cp"
            )
        if self.gen.dp > 1:
            found.append(
                f"--gen: one engine is started, and dp={self.gen.dp} asks for several; give tp, pp and ep"
            )
        if self.engine_python is not None and shutil.which(self.engine_python) is None:
            found.append(f"--engine-python: {self.engine_python} is no program; give a Python that has vLLM")
        if self.device == "cpu" and "ipc" in self.transports:
            found.append("--transport: ipc needs GPUs; with --device cpu give auto, p2p or golden")
        needed = self.world_size + self.gen_ranks
        if self.device == "cuda" and needed > gpus:
            found.append(
                f"{self.world_size} trainer ranks and {self.gen_ranks} engine workers need {needed} GPUs, and this host "
                f"has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found
