"""The ways by which the weights travel: ``nccl_xfer``, rlrefit's packed broadcast, and vLLM's own weight transfer."""

from __future__ import annotations

import importlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ....integration.manifest import dtype_name
from ....integration.records import RefitRecord
from .engine_process import EngineProcess
from .options import LiveOptions
from .trainer import LiveTrainer, TrainerRanks

_HOST = "127.0.0.1"
_VLLM = "vllm.distributed.weight_transfer.nccl_engine"


@dataclass(frozen=True)
class Stage:
    """One trainer rank's view of the run; ``engine`` is there on rank 0 alone."""

    options: LiveOptions
    ranks: TrainerRanks
    trainer: LiveTrainer
    engine: EngineProcess | None


@dataclass(frozen=True)
class Routes:
    """How the weights go: numbers of them, why some don't go shard to shard, and what carries those that do."""

    carrier: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    misc_reasons: dict[str, str] = field(default_factory=dict)


class Path(ABC):
    """One way. All trainer ranks call the same methods at the same time; rank 0 drives the engine."""

    def __init__(self, stage: Stage):
        self._stage = stage

    def unavailable(self) -> str:
        """Why it can't run here, in words; empty if it can."""
        return ""

    @abstractmethod
    def open(self) -> Routes:
        """Meet the engine, and make what serves all refits."""

    @abstractmethod
    def refit(self, version: int) -> list[RefitRecord]:
        """Move all weights once; the records of this rank and, on rank 0, of the engine's, where there are any."""

    @abstractmethod
    def close(self) -> None:
        """Free what :meth:`open` made."""


class SessionPath(Path):
    """A refit session of rlrefit.

    Args:
        stage: of the run.
        transport: ``policy.refit.transport``.
        engine: checkpoint engine, ``nccl_xfer`` or ``packed_broadcast``.
    """

    def __init__(self, stage: Stage, transport: str, engine: str = "nccl_xfer"):
        super().__init__(stage)
        self._config = stage.options.refit_config(transport)
        self._engine = engine

    def open(self) -> Routes:
        stage, trainer = self._stage, self._stage.trainer
        trainer.refit_config = self._config
        meeting = (
            trainer.open_refit_rendezvous(_HOST, stage.options.world_size, stage.options.gen_ranks)
            if stage.ranks.leads
            else None
        )
        meeting = stage.ranks.share(meeting)
        if stage.engine is not None:
            arguments = (meeting, stage.ranks.size, asdict(self._config), self._engine)
            stage.engine.submit("rpc", "init_per_pp_refit_comm_group", *arguments)
        routes = trainer.init_per_pp_refit_comm_group(meeting, stage.ranks.rank, self._engine)
        if stage.engine is not None:
            stage.engine.result()
        session = trainer._refit_session
        assert session is not None, "it was opened above"
        return Routes(
            carrier=session.engine.transport_name,
            reason=getattr(session.engine, "transport_reason", ""),
            counts={name: routes[name] for name in ("bulk", "misc", "unused")},
            misc_reasons=routes["misc_reasons"],
        )

    def refit(self, version: int) -> list[RefitRecord]:
        trainer, engine = self._stage.trainer, self._stage.engine
        whole = self._engine == "packed_broadcast"
        if engine is not None:
            method = "update_weights_from_collective" if whole else "nccl_xfer_refit"
            engine.submit("rpc", method, version)
        send = trainer.broadcast_weights_for_collective if whole else trainer.nccl_xfer_refit
        rows = [send(version)]
        if engine is not None:
            rows += engine.result()
        return [RefitRecord(**row) for row in rows]

    def close(self) -> None:
        if self._stage.engine is not None:
            self._stage.engine.submit("rpc", "close_refit")
        self._stage.trainer.close_refit()
        if self._stage.engine is not None:
            self._stage.engine.result()


class VllmTransferPath(Path):
    """vLLM's packed NCCL weight transfer, fed by Bridge's export, as trainers without rlrefit do it."""

    _group: Any = None

    def unavailable(self) -> str:
        if self._stage.options.device != "cuda":
            return "vLLM's packed weight transfer is NCCL's, which needs GPUs"
        if not self._stage.ranks.leads:
            return ""
        try:
            importlib.import_module(_VLLM)
        except Exception as error:  # an import of another environment's packages fails in many ways
            return (
                f"vLLM's weight transfer can't be imported by the trainer ({type(error).__name__}: {error}); put vLLM on "
                "the trainer's PYTHONPATH, behind its own packages"
            )
        return ""

    def open(self) -> Routes:
        stage, specs = self._stage, self._stage.trainer.source.specs()
        if stage.engine is not None:
            transfer: Any = importlib.import_module(_VLLM).NCCLWeightTransferEngine
            members = 1 + stage.options.gen_ranks
            meeting = {"master_address": _HOST, "master_port": _free_port(), "world_size": members}
            update = {
                "names": [spec.name for spec in specs],
                "dtype_names": [dtype_name(spec.dtype) for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "packed": True,
            }
            stage.engine.submit("join_transfer", {**meeting, "rank_offset": 1}, update)
            self._group = transfer.trainer_init(meeting)
            stage.engine.result()
        return Routes("vLLM's packed NCCL broadcast", counts={"bulk": 0, "misc": len(specs), "unused": 0})

    def refit(self, version: int) -> list[RefitRecord]:
        weights = self._export()
        if self._stage.engine is not None:
            self._stage.engine.submit("transfer")
            transfer: Any = importlib.import_module(_VLLM).NCCLWeightTransferEngine
            transfer.trainer_send_weights(weights, {"group": self._group, "packed": True})
            self._stage.engine.result()
        else:
            for _ in weights:
                pass
        return []

    def close(self) -> None:
        self._group = None

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        source = self._stage.trainer.source
        return source.export([spec.name for spec in source.specs()])


def make_path(stage: Stage, name: str) -> Path:
    """The path of a transport of ``nccl_xfer`` or of a peer, by its name."""
    if name == "vllm":
        return VllmTransferPath(stage)
    if name == "broadcast":
        return SessionPath(stage, "auto", "packed_broadcast")
    return SessionPath(stage, name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
