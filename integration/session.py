"""A refit session: one epoch of ranks, versions that commit everywhere or nowhere, one record per refit.

1. ``RefitSession.open`` connects, lets all ranks agree on weights and plan, and makes communicators.
2. ``refit(version)`` votes on the version, marks the engine dirty, moves the weights, runs the
   engine's post-load work, and votes again: only if every rank succeeded does the version commit.
3. ``close`` ends the epoch.

A rank that fails aborts the epoch, so that no rank waits for it; its peers raise ``PeerLost`` with its
reason. After a failure the session is over: open one with a new epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import cast

import torch
from torch._C._distributed_c10d import TCPStore

from .channel import Channel, Rendezvous
from .config import RefitConfig
from .endpoints import WeightDestination, WeightSource
from .engines import CheckpointEngine, make_engine
from .errors import EngineDirty, RefitError, RefitMismatch
from .manifest import Manifest
from .records import RefitRecord, StageClock
from .world import RefitWorld

logger = logging.getLogger(__name__)


class ServingState:
    """Which weights an engine rank holds, and whether they may be served."""

    def __init__(self) -> None:
        self.version = -1
        self._dirty_since: int | None = None

    @property
    def dirty(self) -> bool:
        """Whether a refit has begun to write and has not committed."""
        return self._dirty_since is not None

    def mark_dirty(self, version: int) -> None:
        """Called before the first byte of ``version`` is written."""
        self._dirty_since = version

    def commit(self, version: int) -> None:
        """Called once every rank of the world holds ``version`` whole."""
        self.version = version
        self._dirty_since = None

    def require_clean(self) -> None:
        """To be called before generating.

        Raises:
            EngineDirty: the weights were written in part.
        """
        if self.dirty:
            raise EngineDirty(
                f"refit {self._dirty_since} began to write this engine's weights and did not commit; what it holds is "
                f"neither version {self.version} nor {self._dirty_since}. Run a refit to its end, or reload the engine.",
                stage="generate",
            )


class RefitSession:
    """One rank's part in the refits of one epoch."""

    def __init__(
        self,
        world: RefitWorld,
        channel: Channel,
        engine: CheckpointEngine,
        endpoint: WeightSource | WeightDestination,
        manifest: Manifest,
        state: ServingState,
    ):
        self.world = world
        self.engine = engine
        self.manifest = manifest
        self.state = state
        self._channel = channel
        self._endpoint = endpoint
        self._failed = ""
        self._refits = 0

    @staticmethod
    def open(
        rendezvous: Rendezvous,
        rank: int,
        make_endpoint: Callable[[], WeightSource | WeightDestination],
        config: RefitConfig,
        *,
        engine: str = "nccl_xfer",
        store: TCPStore | None = None,
        state: ServingState | None = None,
    ) -> RefitSession:
        """Join the epoch. All ranks must call it; it returns once all have agreed.

        Args:
            rendezvous: where the epoch meets.
            rank: rank in the refit world, trainers first.
            make_endpoint: makes a source on trainer ranks, a destination on generation ranks; called here, so
                that the other ranks hear of it if it fails.
            config: the same on all ranks.
            engine: name of a registered checkpoint engine.
            store: the store itself on the rank that opened it.
            state: serving state of the engine, kept over epochs; generation ranks only.

        Raises:
            RefitMismatch, PlanError, RefitTimeout, PeerLost: nothing has been written then.
        """
        world = RefitWorld(rank, rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
        channel = Channel(rendezvous, world, config.timeout_s, store)
        checkpoint_engine: CheckpointEngine | None = None
        try:
            checkpoint_engine = make_engine(engine, config, world, channel)
            endpoint = make_endpoint()
            manifest = checkpoint_engine.prepare(endpoint)
            checkpoint_engine.init_process_group()
            channel.vote("ready", True)
        except Exception as error:
            channel.abort(f"{type(error).__name__}: {error}")
            if checkpoint_engine is not None:
                checkpoint_engine.finalize(failed=True)
            raise
        if rank == 0:
            logger.info(
                "refit epoch %d: %d trainer and %d generation ranks, %s over %s; %d weights bulk (%.1f MB), %d misc (%.1f MB)",
                world.epoch,
                world.train_ranks,
                world.gen_ranks,
                engine,
                checkpoint_engine.transport_name,
                len(manifest.specs("bulk")),
                manifest.bytes_of("bulk") / 1e6,
                len(manifest.specs("misc")),
                manifest.bytes_of("misc") / 1e6,
            )
            unused = [spec.name for spec in manifest.specs("unused")]
            if unused:
                logger.warning(
                    "%d weights of the trainer have no place in the engine and do not travel: %s",
                    len(unused),
                    ", ".join(unused[:10]),
                )
        return RefitSession(world, channel, checkpoint_engine, endpoint, manifest, state or ServingState())

    def refit(self, version: int) -> RefitRecord:
        """Move all weights once and commit ``version`` on all ranks.

        Raises:
            RefitMismatch: the ranks were asked for different versions.
            RefitError: any failure on this rank, or ``PeerLost`` with another rank's reason. Engines that were
                being written stay dirty.
        """
        if self._failed:
            raise RefitError(
                f"this session ended with an error ({self._failed}); open one with a new epoch",
                stage="handshake",
                rank=self.world.rank,
            )
        try:
            return self._refit(version)
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"
            self._channel.abort(self._failed)
            self.engine.finalize(failed=True)
            if not self.world.is_source:
                cast(WeightDestination, self._endpoint).abandon()
            raise

    def close(self) -> None:
        """End the epoch on this rank."""
        self.engine.finalize()

    def _refit(self, version: int) -> RefitRecord:
        device = self._endpoint.device
        clock = StageClock(device)
        memory_before = _memory_mark(device)
        start = time.perf_counter()
        with clock.stage("handshake"):
            self._agree_on_version(version)
        if self.world.is_source:
            with clock.stage("export"):
                cast(WeightSource, self._endpoint).settle()
            moved = self.engine.send_weights(version, clock)
        else:
            self.state.mark_dirty(version)
            moved = self.engine.receive_weights(version, clock)
            with clock.stage("post_load"):
                self._finish(version)
        with clock.stage("commit"):
            self._channel.vote(f"commit/{self._refits}", True)
        if not self.world.is_source:
            self.state.commit(version)
        return RefitRecord(
            version=version,
            epoch=self.world.epoch,
            rank=self.world.rank,
            role="trainer" if self.world.is_source else "generation",
            engine=self.engine.name,
            transport=self.engine.transport_name,
            bytes_bulk=moved.bytes_bulk,
            bytes_misc=moved.bytes_misc,
            bytes_kept=self._kept_bytes(),
            bytes_verified=moved.bytes_verified,
            seconds_total=time.perf_counter() - start,
            seconds=clock.seconds,
            peak_extra_bytes=max(self.engine.staging_bytes, _memory_peak(device) - memory_before),
        )

    def _finish(self, version: int) -> None:
        cast(WeightDestination, self._endpoint).finish(version)

    def _kept_bytes(self) -> int:
        return 0 if self.world.is_source else cast(WeightDestination, self._endpoint).kept_bytes

    def _agree_on_version(self, version: int) -> None:
        # Counted and not named by version: ranks that disagree on the version must still meet here.
        versions = self._channel.vote(f"begin/{self._refits}", version)
        self._refits += 1
        if len(set(versions)) != 1:
            listed = ", ".join(f"{self.world.describe(r)}: {v}" for r, v in enumerate(versions))
            raise RefitMismatch(f"the ranks were asked for different versions: {listed}", stage="handshake")


def _memory_mark(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
