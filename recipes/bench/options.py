"""What ``rlrefit bench`` was asked for, checked before any process starts."""

from __future__ import annotations

import argparse
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...integration.config import TRANSPORTS, RefitConfig
from ...integration.transport import ONE_SIDED
from ..config.options import missing_engine, missing_megatron, refit_problems
from ..plan.catalog import FsdpLayout, GenLayout, TrainLayout, parse_gen, parse_train

if TYPE_CHECKING:
    from ...workers.trainers.megatron.model import MegatronLayout

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
    @abstractmethod
    def world_size(self) -> int:
        """Processes to start."""

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
            "--peers: none has no others beside it; give it alone, or leave it out"
            if name == "none"
            else f"--peers: {name!r} is not one of {', '.join(self.known_peers)} or none"
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
        if self.device == "cpu":
            *names, last = self.cpu_transports
            found += [
                f"--transport: {name} needs GPUs; with --device cpu give {', '.join(names)} or {last}"
                for name in self.transports
                if name in (*ONE_SIDED, "m2n")
            ]
        return found


def common_options(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    """Attributes of :class:`RunOptions` as the command line has them; what was left out is left to the class.

    Args:
        arguments: of the command line.
        peers: those that run where the user names none.

    Raises:
        LayoutError: a layout can't be read.
    """
    named = names_of(arguments.peers or [",".join(peers)])
    same = (
        "model", "dtype", "refits", "warm_up", "peer_refits", "bucket_mb", "streams", "layers", "verify", "device", "timeout_s"
    )  # fmt: skip
    return {
        **{name: given for name in same if (given := getattr(arguments, name)) is not None},
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


PEERS = ("broadcast", "per-tensor", "vllm")
# Not a transport of ``policy.refit``: ``p2p`` of the engine ``colocated_ipc``.
BUCKETS = "buckets"


@dataclass(frozen=True)
class BenchOptions(RunOptions):
    """A run of a model's true shapes; its transports' first three refits and last one are checked.

    Attributes:
        quantize: ``fp8`` for engines that hold linear layers in blocks of FP8, which the trainers make; or ``off``.
        check: compare what landed with the true values, bit for bit.
        changed: shares of all elements that change before a sparse refit, for which refits with ``delta: always`` are timed.
        delta_base: ``policy.refit.delta_base`` of these.
        timeline: keep every stage's intervals of one refit.
        colocated: trainer rank i and engine rank i are two processes on one GPU.
        sleep: engines give the memory of their weights back between refits.
        leave: trainers do, and come back with the same weights.
        probe_bytes: message size of the pairwise p2p rate, and of the device's copy rate.
    """

    peers: tuple[str, ...] = PEERS
    refits: int = 20
    warm_up: int = 3
    peer_refits: int = 5
    timeout_s: float = 300.0
    quantize: str = "off"
    check: bool = True
    changed: tuple[float, ...] = ()
    delta_base: str = RefitConfig().delta_base
    timeline: bool = False
    colocated: bool = False
    sleep: bool = False
    leave: bool = False
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
        for option, given, who in (("--sleep", self.sleep, "engines"), ("--leave", self.leave, "trainers")):
            if given and self.device != "cuda":
                found.append(f"{option}: {who}' memory is that of GPUs; leave {option} or --device cpu out")
        if self.leave and self.changed:
            found.append("--leave: trainers come back with dense versions; leave --changed out")
        if self.changed and "golden" in self.transports:
            found.append("--changed: golden sends all weights each time; leave it out of --transport")
        if self.changed and self.is_quantized and self.delta_base == "optimizer":
            found.append(
                "--delta-base: optimizer records no codes that trainers make; give gpu or host, or leave --quantize out"
            )
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


# By ``--backend``: the engine's name, and the peers that run beside it.
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LIVE_PEERS = {"vllm": ("broadcast", "vllm"), "sglang": ("broadcast", "sglang")}


@dataclass(frozen=True)
class LiveOptions(RunOptions):
    """A run between a live trainer and a live engine.

    Attributes:
        backend: the engine, a key of :data:`ENGINES`.
        gpu_memory_utilization: the engine's; SGLang calls it ``mem_fraction_static``.
        engine_python: the engine's interpreter; None for this one.
        engine_pythonpath: the engine's PYTHONPATH; None leaves it.
        engine_log: file for the output of the engine's processes; None for a temporary one.
        json: file for the figures.
    """

    backend: str = "vllm"
    peers: tuple[str, ...] = LIVE_PEERS["vllm"]
    refits: int = 10
    warm_up: int = 2
    peer_refits: int = 3
    timeout_s: float = 600.0
    gpu_memory_utilization: float = 0.8
    engine_python: str | None = None
    engine_pythonpath: str | None = None
    engine_log: Path | None = None
    json: Path | None = None

    @property
    def known_peers(self) -> tuple[str, ...]:
        return LIVE_PEERS[self.backend]

    @property
    def world_size(self) -> int:
        """Trainer ranks: the processes that this command starts itself; the engine starts its own."""
        return int(self.train.world_size)

    @property
    def last(self) -> int:
        """Number of the last refit of a transport, whose result is compared with the peers' as well."""
        return self.warm_up + self.refits

    def megatron_layout(self) -> MegatronLayout:
        """The trainer's layout in Megatron's terms."""
        from ...workers.trainers.megatron.model import MegatronLayout

        assert not isinstance(self.train, FsdpLayout), "violations() refuses it"
        return MegatronLayout(
            tensor_parallel=self.train.tp,
            pipeline_parallel=self.train.pp,
            virtual_pipeline=self.train.vpp if self.train.vpp > 1 else None,
            expert_parallel=self.train.ep,
            expert_tensor_parallel=self.train.etp,
            context_parallel=self.train.cp,
        )

    def violations(self, gpus: int) -> list[str]:
        """All that is wrong, one sentence each with the remedy; empty if nothing is.

        Args:
            gpus: GPUs of this host.
        """
        found = self.common_violations()
        if not 0 < self.gpu_memory_utilization <= 1:
            found.append(
                f"--gpu-memory-utilization: {self.gpu_memory_utilization} is not above 0 and at most 1"
            )
        if isinstance(self.train, FsdpLayout):
            found.append("--train: the live trainer is Megatron's; give its sizes (tp, pp, ep) and no fsdp")
        elif self.train.first is not None or self.train.last is not None or self.train.cp > 1:
            found.append(
                "--train: the live trainer is built with equal stages and cp=1; leave out first, last and cp"
            )
        if self.gen.dp > 1:
            found.append(
                f"--gen: one engine is started, and dp={self.gen.dp} asks for several; give tp, pp and ep"
            )
        if self.backend == "sglang" and self.gen.pp > 1:
            found.append(
                f"--gen: pp={self.gen.pp}, and refits of SGLang are of one tensor-parallel group; give tp and ep"
            )
        if self.engine_python is not None and shutil.which(self.engine_python) is None:
            found.append(
                f"--engine-python: {self.engine_python} is no program; give a Python that has {ENGINES[self.backend]}"
            )
        if self.engine_python is None and self.engine_pythonpath is None:
            elsewhere = (
                "give --engine-python or --engine-pythonpath of an installation that has it, and rlrefit"
            )
            found += missing_engine("--backend", self.backend, elsewhere)
        found += missing_megatron(
            "--live", "rlrefit bench without it, which starts neither a trainer nor an engine"
        )
        needed = self.world_size + self.gen_ranks
        if self.device == "cuda" and needed > gpus:
            found.append(
                f"{self.world_size} trainer ranks and {self.gen_ranks} engine workers need {needed} GPUs, and this host "
                f"has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found
