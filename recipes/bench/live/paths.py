"""The ways by which the weights travel: ``nccl_xfer``, rlrefit's packed broadcast, and the engines' own weight transfers."""

from __future__ import annotations

import importlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ....integration.records.record import RefitRecord
from ....integration.weights.manifest import TensorSpec, dtype_name
from ..options import LiveOptions
from .engine_process import EngineProcess
from .trainer import LiveTrainer, TrainerRanks
from .update_group import flattened, in_buckets, join_update_group

_HOST = "127.0.0.1"
# Of all that SGLang gets at once; verl and slime have the like.
_BUCKET_BYTES = 1 << 30
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


class _SessionPath(Path):
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
            stage.engine.submit("join_refit", meeting, stage.ranks.size, asdict(self._config), self._engine)
        routes = trainer.join_refit(meeting, stage.ranks.rank, self._engine)
        if stage.engine is not None:
            stage.engine.result()
        session = trainer._refit_session
        assert session is not None, "it was opened above"
        return Routes(
            carrier=session.engine.transport_name,
            reason=session.engine.transport_reason,
            counts={name: routes[name] for name in ("bulk", "misc", "unused")},
            misc_reasons=routes["misc_reasons"],
        )

    def refit(self, version: int) -> list[RefitRecord]:
        trainer, engine = self._stage.trainer, self._stage.engine
        if engine is not None:
            engine.submit("refit", version)
        rows = [trainer.refit(version)]
        if engine is not None:
            rows += engine.result()
        return [RefitRecord(**row) for row in rows]

    def close(self) -> None:
        if self._stage.engine is not None:
            self._stage.engine.submit("close_refit")
        self._stage.trainer.close_refit()
        if self._stage.engine is not None:
            self._stage.engine.result()


class _ExportPath(Path):
    """An engine's own weight transfer, fed by Bridge's export, as trainers without rlrefit do it.

    All trainer ranks gather each tensor for rank 0, which alone sends.
    """

    def open(self) -> Routes:
        specs = self._stage.trainer.source.specs()
        if self._stage.engine is not None:
            self._join(self._stage.engine, specs)
        return Routes(self.carrier, counts={"bulk": 0, "misc": len(specs), "unused": 0})

    def refit(self, version: int) -> list[RefitRecord]:
        source = self._stage.trainer.source
        weights = source.export([spec.name for spec in source.specs()])
        if self._stage.engine is not None:
            self._send(self._stage.engine, weights)
        else:
            for _ in weights:
                pass
        return []

    @property
    @abstractmethod
    def carrier(self) -> str:
        """What brings the weights, in words."""

    @abstractmethod
    def _join(self, engine: EngineProcess, specs: Sequence[TensorSpec]) -> None:
        """On rank 0: meet the engine's workers."""

    @abstractmethod
    def _send(self, engine: EngineProcess, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """On rank 0: all weights, until the engine has them."""


class _VllmTransferPath(_ExportPath):
    """vLLM's packed NCCL weight transfer."""

    carrier = "vLLM's packed NCCL broadcast"
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

    def _join(self, engine: EngineProcess, specs: Sequence[TensorSpec]) -> None:
        transfer: Any = importlib.import_module(_VLLM).NCCLWeightTransferEngine
        members = 1 + self._stage.options.gen_ranks
        meeting = {"master_address": _HOST, "master_port": _free_port(), "world_size": members}
        update = {
            "names": [spec.name for spec in specs],
            "dtype_names": [dtype_name(spec.dtype) for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "packed": True,
        }
        engine.submit("join_transfer", {**meeting, "rank_offset": 1}, update)
        self._group = transfer.trainer_init(meeting)
        engine.result()

    def _send(self, engine: EngineProcess, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        engine.submit("transfer")
        transfer: Any = importlib.import_module(_VLLM).NCCLWeightTransferEngine
        transfer.trainer_send_weights(weights, {"group": self._group, "packed": True})
        engine.result()

    def close(self) -> None:
        self._group = None


class _SglangUpdatePath(_ExportPath):
    """SGLang's ``update_weights_from_distributed``: its flattened buckets, one after another, as trainers without rlrefit do it."""

    carrier = "SGLang's update_weights_from_distributed, in flattened buckets"
    _group: Any = None

    def _join(self, engine: EngineProcess, specs: Sequence[TensorSpec]) -> None:
        options, port = self._stage.options, _free_port()
        members, backend = 1 + options.gen_ranks, "nccl" if options.device == "cuda" else "gloo"
        engine.submit("join_update_group", _HOST, port, members, backend)
        timeout = timedelta(seconds=options.timeout_s)
        self._group = join_update_group(_HOST, port, members, backend, timeout)
        engine.result()

    def _send(self, engine: EngineProcess, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for bucket, last in in_buckets(weights, _BUCKET_BYTES):
            names = [name for name, _ in bucket]
            dtypes = [dtype_name(tensor.dtype) for _, tensor in bucket]
            engine.submit("update", names, dtypes, [list(tensor.shape) for _, tensor in bucket], last)
            dist.broadcast(flattened(bucket), 0, group=self._group)
            engine.result()

    def close(self) -> None:
        if self._stage.engine is not None:
            self._stage.engine.submit("leave_update_group")
            dist.destroy_process_group(self._group)
            self._stage.engine.result()
        self._group = None


_EXPORTS = {"vllm": _VllmTransferPath, "sglang": _SglangUpdatePath}


def make_path(stage: Stage, name: str) -> Path:
    """The path of a transport of ``nccl_xfer`` or of a peer, by its name."""
    if name in _EXPORTS:
        return _EXPORTS[name](stage)
    if name == "broadcast":
        return _SessionPath(stage, "auto", "packed_broadcast")
    return _SessionPath(stage, name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
