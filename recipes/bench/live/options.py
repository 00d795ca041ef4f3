"""What ``rlrefit bench-live`` was asked for, checked before any process starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ....workers.trainers.megatron.model import MegatronLayout
from ...config.options import missing_engine, missing_megatron
from ...plan.catalog import FsdpLayout
from ..run_options import RunOptions

# ``--backend`` → what it is called, and the peers that there are beside it.
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
PEERS = {"vllm": ("broadcast", "vllm"), "sglang": ("broadcast", "sglang")}


@dataclass(frozen=True)
class LiveOptions(RunOptions):
    """One run.

    Attributes:
        backend: the engine, a key of :data:`ENGINES`.
        gpu_memory_utilization: the engine's; SGLang calls it ``mem_fraction_static``.
        engine_python: the engine's interpreter; None for this one.
        engine_pythonpath: the engine's PYTHONPATH; None leaves it.
        engine_log: file for the output of the engine's processes; None for a temporary one.
        json: file for the figures.
    """

    backend: str = "vllm"
    peers: tuple[str, ...] = PEERS["vllm"]
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
        return PEERS[self.backend]

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
        found += missing_megatron("bench-live", "rlrefit bench, which starts neither a trainer nor an engine")
        needed = self.world_size + self.gen_ranks
        if self.device == "cuda" and needed > gpus:
            found.append(
                f"{self.world_size} trainer ranks and {self.gen_ranks} engine workers need {needed} GPUs, and this host "
                f"has {gpus}; give smaller layouts, or --device cpu with a small model or --layers"
            )
        return found
