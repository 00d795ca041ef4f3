"""verl's checkpoint engine ``nccl_xfer_shards``: an actor's shards go straight into the live parameters of the engine's workers.

    actor_rollout_ref.rollout:
      checkpoint_engine:
        backend: nccl_xfer_shards
        custom_backend_module: rlrefit.workers.frameworks.verl.engine
      engine_kwargs:
        vllm:
          worker_extension_cls: rlrefit.workers.frameworks.verl.extension.VerlRefitExtension
        sglang:
          custom_weight_loader: [rlrefit.workers.engines.sglang.loader.load]

verl asks its rollout workers, processes beside the engine's, to hand the weights over. Here they give an order, and the
engine's workers meet the actors themselves: each rollout worker hands it to its vLLM worker in place of weights, or the
first one of a replica gives it to SGLang's server. verl's manager and its workers stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from verl.checkpoint_engine import base as verl_base

from ....integration.control import Rendezvous, RendezvousServer
from ....integration.errors import RefitError
from ....integration.records.files import require_records_dir, write_record
from ....integration.records.record import RefitRecord
from ...trainers.source_mixin import SourceRefitMixin
from .contract import require_supported
from .epochs import EpochEngine, discard, meet_own_actor, metrics_of
from .options import BACKEND, ShardOptions
from .orders import ORDER, Order
from .source import source_of

if TYPE_CHECKING:
    from .sglang_server import SglangServer

require_supported(verl_base)

logger = logging.getLogger(__name__)


@verl_base.CheckpointEngineRegistry.register(BACKEND)
class ShardCheckpointEngine(EpochEngine):
    """The engine of one worker: an actor rank, or a rollout worker beside its vLLM worker.

    Args:
        bucket_size: bytes of a bucket.
        is_master: whether this is actor rank 0.
        options: of :class:`ShardOptions`.
    """

    protocol = "shards 1"

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any):
        self.options = ShardOptions.from_kwargs(bucket_size, options)
        require_records_dir(
            self.options.records_dir, f"checkpoint_engine.engine_kwargs.{BACKEND}.records_dir"
        )
        super().__init__(is_master, self.options.refit.port)
        self.version: int | None = None
        self._source: SourceRefitMixin | None = None
        self._training: Any = None
        # Of a rollout worker: whether it has learnt which engine is beside it; verl's way to the server if that is SGLang's, and
        # the server for the worker that speaks to it, as verl has decided: the first of a replica.
        self._knows_rollout = False
        self._adapter: Any = None
        self._sglang: SglangServer | None = None
        self._meeting: Rendezvous | None = None
        self._train_ranks = 0
        self._server: RendezvousServer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._arrived: RefitRecord | None = None
        # Whether send_weights ends the update here, and whether an engine is on this worker's GPU.
        self._ends_updates = self._shares_gpu = False
        # Version that a rollout worker has ordered, and whether its last order was fulfilled on all ranks.
        self._ordered: int | None = None
        self._fulfilled = False

    def prepare(self) -> dict[str, Any]:
        self._ends_updates = self._shares_gpu = False
        return super().prepare()

    def begin(self, shares_gpu: bool) -> dict[str, Any]:
        """As :meth:`prepare`, for an update that this worker ends by itself: no finalize and release follow one that succeeds.

        Args:
            shares_gpu: whether an engine that sleeps on this worker's GPU takes its memory next.

        Returns:
            As :meth:`prepare`, and ``ready``: whether :meth:`refit` may be called if the epoch goes on.
        """
        if shares_gpu:
            _empty_cache()
        report = self.prepare()
        self._ends_updates, self._shares_gpu = True, shares_gpu
        ready = self._source is not None and not self._training.is_param_offload_enabled
        return report | {"ready": ready}

    def refit(self, version: int) -> dict[str, float]:
        """As :meth:`send_weights` in an epoch that goes on, without verl's update around it.

        That prepares an export, from which nothing is drawn here, and brings offloaded parameters back.
        """
        self._close_listener()
        return self._arrive(self._own_thread().submit(self._refit, version).result())

    def _holds(self) -> bool:
        self._arrived = self._ordered = None
        if self._source is None:
            return self._fulfilled  # the engine's worker has the session; if that has ended, the actors know
        return self._meeting is None and self._source.refit_healthy()

    def _leave(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def _join(self, rendezvous: Rendezvous, server: RendezvousServer | None) -> None:
        # All meet in the update itself: the engine's workers hear of it then, and leave the last epoch as they do.
        _empty_cache()  # NCCL's memory, which a new epoch takes, is not torch's
        self._server, self._meeting, self._fulfilled = server, rendezvous, False
        self._train_ranks = rendezvous.train_ranks

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Actors: send this rank's shards, and wait until every worker of an engine has all of its own.

        Args:
            weights: verl's export, of which nothing is drawn.
            global_steps: version of the weights; 0 without one.

        Returns:
            Metrics for the trainer's log; empty but on rank 0.

        Raises:
            RefitError: and its kinds; verl then leaves the engines paused.
        """
        self._close_listener()
        await discard(weights)
        if self._source is None:
            await self._meet_own_source()
        return self._arrive(await self._in_thread(self._refit, 0 if global_steps is None else global_steps))

    def _arrive(self, found: dict[str, Any]) -> dict[str, float]:
        record = self._arrived = RefitRecord(**found)
        metrics = metrics_of(record)
        if self._ends_updates:
            # All have all: a refit returns on no rank before that.
            self.finalize()
            start = time.perf_counter()
            self.release()
            metrics["checkpoint_engine/release_seconds"] = time.perf_counter() - start
        return metrics if record.rank == 0 else {}

    async def receive_weights(  # verl's own are generators, too
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Rollout workers: one order in place of all weights, which verl hands to the vLLM worker; nothing to SGLang's.

        Raises:
            UnsupportedVerl: its way to SGLang is not as this was written for.
            RefitError: SGLang's workers have not all weights; verl then leaves the engines paused.
        """
        self._fulfilled = False
        self._ordered = 0 if global_steps is None else global_steps
        if not self._knows_rollout:
            await meet_own_actor()
        meeting, self._meeting = self._meeting, None
        order = Order(
            None if meeting is None else meeting.to_json(),
            self._rank,
            self._train_ranks,
            self._ordered,
            asdict(self.options.refit),
            self.options.records_dir,
        )
        if self._adapter is None:
            yield ORDER, order.to_tensor()
        elif self._adapter._engine is not None:
            from .sglang_server import SglangServer  # imports SGLang, which is there where a server of it is

            if self._sglang is None:
                self._sglang = SglangServer(self._adapter.server_actor, self._adapter.replica_rank)
            await self._in_thread(self._sglang.refit, order)

    def finalize(self) -> None:
        """Commit: verl calls it once all actors have sent, and with that all workers of the engines have all."""
        self._close_listener()
        if self._ordered is not None:
            self.version, self._ordered, self._fulfilled = self._ordered, None, True
        if self._arrived is not None:
            record, self._arrived = self._arrived, None
            self.version = record.version
            if self.options.records_dir is not None:
                write_record(self.options.records_dir, record, self._train_ranks)

    def release(self) -> None:
        """Give back what an update took of the trainer's GPU."""
        if self._training is not None and self._training.is_param_offload_enabled:
            self._training.to("cpu", model=True, optimizer=False, grad=False)
        if self._shares_gpu:
            _empty_cache()

    def introduce(self, worker: Any) -> None:
        """Learn of the actor that this engine belongs to.

        Raises:
            RefitError: it can't refit shard to shard; lists all reasons.
        """
        self._source = source_of(worker, self.options.refit)
        self._training = worker.actor.engine

    def introduce_rollout(self, worker: Any) -> None:
        """Learn of the rollout worker that this engine belongs to."""
        self._knows_rollout = True
        if worker.rollout_config.name == "sglang":
            self._adapter = worker.server_adapter

    async def _meet_own_source(self) -> None:
        try:
            await meet_own_actor()
            if self._source is None:
                raise RefitError(
                    "this process has no ActorRolloutRefWorker of verl with a checkpoint engine, so there are no shards to "
                    "send",
                    stage="settings",
                )
        except BaseException:
            if self._server is not None:
                self._server.close()  # the engines' workers have set out to meet the actors
            raise

    def _refit(self, version: int) -> dict[str, Any]:
        source = self._source
        assert source is not None, "looked up before"
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            found = source.join_refit(meeting.to_json(), self._rank)
            if self.is_master:
                logger.info("shard to shard: %d weights bulk, %d misc", found["bulk"], found["misc"])
        return source.refit(version)

    async def _in_thread[T](self, call: Callable[..., T], *args: Any) -> T:
        """Run what waits for other ranks beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._own_thread(), call, *args)

    def _own_thread(self) -> ThreadPoolExecutor:
        """One thread, which has this one's device."""
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = ThreadPoolExecutor(
                1,
                thread_name_prefix="rlrefit",
                initializer=lambda: None if device is None else torch.cuda.set_device(device),
            )
        return self._thread


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
