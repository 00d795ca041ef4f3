"""verl's checkpoint engine ``nccl_xfer``, over the full tensors that any of verl's training engines exports.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: nccl_xfer
      custom_backend_module: rlrefit.workers.frameworks.verl.full_tensors

verl imports the module on the driver, on actors and on rollout workers, and it registers itself there.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch
from verl.checkpoint_engine import base as verl_base

from ....integration.broadcast.full_tensors import FullTensorEpoch, FullTensorSettings, Weights
from ....integration.config import read_settings
from ....integration.control import Rendezvous, RendezvousServer
from ....integration.errors import RefitError
from ....integration.records.files import require_records_dir, write_record
from ....integration.records.record import RefitRecord
from .contract import NO_BUCKET, require_known_model, require_supported
from .epochs import EpochEngine, discard, meet_own_actor, metrics_of
from .served import model_violations

require_supported(verl_base)

logger = logging.getLogger(__name__)

BACKEND = "nccl_xfer"


@dataclass(frozen=True)
class VerlOptions:
    """``checkpoint_engine.engine_kwargs.nccl_xfer``.

    Attributes:
        timeout_s: seconds that any wait for another worker may take; the error names the worker.
        verify: checksums of the buckets' bytes: ``off``, ``sampled`` (one bucket of an update, another one each time; all of a
            group's first update) or ``full``. Names and places are checked in every bucket.
        port: TCP port of the rendezvous on actor rank 0; 0 takes any free one. With one that is fixed the group is made
            anew for each update.
        records_dir: folder for ``refits-<role>-<rank>.jsonl``, a line an update; null for none.
    """

    timeout_s: float
    verify: str
    port: int
    records_dir: str | None = None

    @staticmethod
    def from_kwargs(bucket_size: int, given: dict[str, Any]) -> VerlOptions:
        """The options, checked.

        Raises:
            RefitError: lists all that is wrong.
        """
        prefix = f"checkpoint_engine.engine_kwargs.{BACKEND}"
        read = read_settings(
            given, prefix, keys=("timeout_s", "verify", "port"), own={"records_dir": str | None}
        )
        wrong = list(read.wrong)
        if bucket_size < 1:
            wrong.append(NO_BUCKET)
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return VerlOptions(read.refit.timeout_s, read.refit.verify, read.refit.port, **read.own)


@verl_base.CheckpointEngineRegistry.register(BACKEND)
class NcclXferCheckpointEngine(EpochEngine):
    """The engine of one worker: an actor rank, or a rollout worker beside its inference process.

    Args:
        bucket_size: bytes of a bucket; two are held on actor rank 0 and on every rollout worker during an update.
        is_master: whether this is actor rank 0.
        options: fields of :class:`VerlOptions`.
    """

    protocol = 2

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any):
        self.options = VerlOptions.from_kwargs(bucket_size, options)
        require_records_dir(
            self.options.records_dir, f"checkpoint_engine.engine_kwargs.{BACKEND}.records_dir"
        )
        super().__init__(is_master, self.options.port)
        self.version: int | None = None
        self._settings = FullTensorSettings(bucket_size, self.options.verify, float(self.options.timeout_s))
        self._epoch: FullTensorEpoch | None = None
        self._arrived: RefitRecord | None = None
        self._knows_actor = False

    def introduce(self, worker: Any) -> None:
        require_known_model(worker)
        if wrong := model_violations(worker.config.model):
            raise RefitError(
                f"this run of verl can't update its engines: {'; '.join(wrong)}. Nothing was sent",
                stage="settings",
            )

    def _holds(self) -> bool:
        self._arrived = None
        if self._epoch is not None and not self._epoch.healthy():
            self._epoch = None
        return self._epoch is not None

    def _leave(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def _join(self, rendezvous: Rendezvous, server: RendezvousServer | None) -> None:
        self._epoch = FullTensorEpoch(rendezvous, self._rank, self._settings, server)
        if self.is_master:
            world = self._epoch.world
            logger.info(
                "refit epoch %d: %d actors, %d rollout workers, full tensors by packed broadcast on %s",
                world.epoch,
                world.train_ranks,
                world.gen_ranks,
                self._epoch.device.type,
            )

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        """Actors: export all weights, on rank 0 send them, and wait until every rollout worker has them.

        Returns:
            Metrics for the trainer's log; empty but on rank 0.

        Raises:
            RefitError: and its kinds; verl then leaves the engines paused.
        """
        if not self._knows_actor:
            try:
                await meet_own_actor()
            except BaseException as error:
                self._open_epoch.fail(error)  # the rollout workers wait
                await discard(weights)
                raise
            self._knows_actor = True
        record = await self._open_epoch.send(weights, global_steps)
        self._arrived = record
        return metrics_of(record) if record.rank == 0 else {}

    async def receive_weights(  # type: ignore[override]  # verl's own are generators, too
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Rollout workers: all weights, as they arrive.

        Raises:
            RefitError: and its kinds; verl then leaves the engines paused.
        """
        async for weight in self._open_epoch.receive(global_steps, self._take):
            yield weight

    def finalize(self) -> None:
        """Commit: verl calls it once all workers have sent or loaded all weights."""
        self._close_listener()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the buckets' memory is the inference process's, which shares the GPU
        if self._arrived is None:
            return
        record, self._arrived = self._arrived, None
        self.version = record.version
        if self.options.records_dir is not None:
            write_record(self.options.records_dir, record, self._open_epoch.world.train_ranks)

    @property
    def _open_epoch(self) -> FullTensorEpoch:
        if self._epoch is None:
            raise RefitError(
                "no group is open: verl's manager calls prepare and init_process_group before every update",
                stage="handshake",
            )
        return self._epoch

    def _take(self, record: RefitRecord) -> None:
        self._arrived = record
