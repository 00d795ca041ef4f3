"""A refit session: one epoch of ranks, versions that no rank serves in part, one record per refit.

1. ``RefitSession.open`` connects, lets all ranks agree on weights and plan, and makes communicators.
2. ``refit(version)`` prepares the trainer's weights, marks the engine dirty, meets all ranks over the version, follows
   storages that moved on any of them, moves the weights, runs the engine's post-load work, and meets again: only if every
   rank succeeded does the version commit. A rank that refuses before the last meeting ahead of the first byte leaves every
   engine what it was.
3. ``close`` ends the epoch.

A rank that fails aborts the epoch, so that no rank waits for it; its peers raise ``PeerLost`` with its
reason. After a failure the session is over: open one with a new epoch.

No rank ever serves a mix of versions. But that all ranks commit or none can't be had: once the last meeting has decided
that a version commits, a rank may die, or be interrupted, or lose its connection before it hears of it. It stays dirty and
refuses to generate, while others hold the version and serve it. A refit heals that in the next epoch, by its version:
whatever version a rank held before, and whether it was dirty, all hold the new one afterwards, which may be the same again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import cast

import torch

from .comm.waiting import wait_until
from .config import RefitConfig, require_equal_settings
from .control import Rendezvous
from .control.channel import Channel, refusals_told
from .control.world import RefitWorld, whole_number
from .delta.choice import DENSE
from .engine.refit import Moved, RefitEngine
from .errors import EngineDirty, RefitError, RefitTimeout, end_all
from .records.clock import StageClock
from .records.record import RefitRecord
from .transport.streams import working_on
from .weights.endpoints import WeightDestination, WeightSource, prepares_alone
from .weights.manifest import Manifest
from .weights.packing_experts import ExpertPackingSource
from .weights.source_thread import require_in_step

logger = logging.getLogger(__name__)

# Of a meeting before a refit, beside those of :mod:`.delta.choice`: this rank's storage has moved; this trainer rank prepares its
# weights together with others, which has to wait until all are there.
_STALE, _UNPREPARED = 1, 8


class ServingState:
    """Which weights an engine rank holds, and whether they may be served."""

    def __init__(self) -> None:
        self.version = -1
        self._dirty_since: int | None = None

    @property
    def dirty(self) -> bool:
        """Whether a refit may have begun to write and has not committed."""
        return self._dirty_since is not None

    @property
    def dirty_since(self) -> int | None:
        """The version of that refit; None if there is none."""
        return self._dirty_since

    def mark_dirty(self, version: int) -> None:
        """Called before anybody may write the first byte of ``version``."""
        self._dirty_since = version

    def take_back(self, earlier: int | None) -> None:
        """Called where nobody can have written since :attr:`dirty_since` was ``earlier``."""
        self._dirty_since = earlier

    def commit(self, version: int) -> None:
        """Called once every rank of the world holds ``version`` whole, whatever this one held before."""
        self.version = version
        self._dirty_since = None

    def replaced(self) -> None:
        """Called before weights are written that no refit brings: what this rank holds is no version's from here on."""
        self.version = -1

    def require_clean(self) -> None:
        """To be called before generating.

        Raises:
            EngineDirty: the weights were written in part.
        """
        if self.dirty:
            raise EngineDirty(
                f"refit {self._dirty_since} began to write this engine's weights, or may have, and did not commit here; what it "
                f"holds may be neither version {self.version} nor {self._dirty_since}. Run a refit to its end, or reload the "
                "engine.",
                stage="generate",
            )


class RefitSession:
    """One rank's part in the refits of one epoch."""

    def __init__(
        self,
        world: RefitWorld,
        channel: Channel,
        engine: RefitEngine,
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
        # Asked for once: it walks through all parameters, and a shard keeps its size.
        self._kept_bytes = 0 if world.is_source else cast(WeightDestination, endpoint).kept_bytes
        self._clock = StageClock(endpoint.device)
        self._failed = ""
        self._closed = self._under_way = False
        self._refits = self._follows = self._moves = 0
        # Whether storages had moved on any rank before the last refit.
        self._moved_before = False

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def open(
        rendezvous: Rendezvous,
        rank: int,
        make_endpoint: Callable[[], WeightSource | WeightDestination],
        config: RefitConfig,
        *,
        engine: str = "nccl_xfer",
        state: ServingState | None = None,
    ) -> RefitSession:
        """Join the epoch. All ranks must call it; it returns once all have agreed.

        Args:
            rendezvous: where the epoch meets.
            rank: rank in the refit world, trainers first.
            make_endpoint: makes a source on trainer ranks, a destination on generation ranks; called here, so
                that the other ranks hear of it if it fails.
            config: the same on all ranks, but for ``timeout_s`` and ``port``.
            engine: ``nccl_xfer``; ``colocated_ipc``, the same through memory of the one host that all ranks are on; or
                ``packed_broadcast``, where every weight takes the misc path.
            state: serving state of the engine, kept over epochs; generation ranks only.

        Raises:
            RefitError: the configuration is wrong; all that is wrong with it is listed.
            RefitMismatch, PlanError, RefitTimeout, PeerLost: nothing has been written then.
        """
        with refusals_told(rendezvous, rank):
            world = RefitWorld(rank, rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
            problems = config.violations()
            if problems:
                raise RefitError("; ".join(problems), stage="settings", rank=world.rank)
        start = time.monotonic()
        channel = Channel(rendezvous, world, config.timeout_s)
        refit_engine: RefitEngine | None = None
        try:
            with channel.within(start):
                refit_engine = RefitEngine(engine, config, world, channel)
                if world.is_source:
                    require_in_step(rank)
                _agree_on_settings(channel, engine, config)
                endpoint = make_endpoint()
                if config.trainer_quantize_mxfp4 and world.is_source:
                    endpoint = ExpertPackingSource(cast(WeightSource, endpoint))
                with working_on(endpoint.device):
                    manifest = refit_engine.prepare(endpoint)
                    refit_engine.init_process_group()
                    session = RefitSession(
                        world, channel, refit_engine, endpoint, manifest, state or ServingState()
                    )
                channel.barrier("ready")
        except BaseException as error:  # an interrupt, too: the others would wait for their whole limit
            opened = [] if refit_engine is None else [partial(refit_engine.finalize, failed=True)]
            _give_up(error, channel, opened, [lambda _: channel.close()])
            raise
        if rank == 0:
            logger.info(
                "refit epoch %d: %d trainer and %d generation ranks, %s over %s%s; %d weights bulk (%.1f MB), %d misc (%.1f MB)",
                world.epoch,
                world.train_ranks,
                world.gen_ranks,
                engine,
                refit_engine.transport_name,
                f" ({refit_engine.transport_reason})" if refit_engine.transport_reason else "",
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
        return session

    def refit(
        self, version: int, *, timeline: bool = False, before: Callable[[], None] | None = None
    ) -> RefitRecord:
        """Move all weights once and commit ``version`` on all ranks.

        Args:
            version: number of these weights, a whole one from 0 on; the same on all ranks.
            timeline: whether the record carries every interval of every stage.
            before: called before the ranks meet: its error ends the refit on all of them, with nothing written.

        Raises:
            RefitMismatch: the ranks were asked for different versions, or a weight is not any more what they agreed on;
                raised on every rank, with nothing written.
            RefitError: ``version`` is no such number; nothing was written.
            RefitError: any failure on this rank, or ``PeerLost`` with another rank's reason. Engines that may have
                been written stay dirty. One that holds the version may refuse to serve it, since it did not hear that it
                committed; a refit in a new epoch heals it.
        """
        if self._failed or self._closed:
            why = f"ended with an error ({self._failed})" if self._failed else "is closed"
            raise RefitError(
                f"this session {why}; open a new epoch (open_refit_rendezvous on trainer rank 0, join_refit on all ranks of both sides)",
                stage="handshake",
                rank=self.world.rank,
            )
        self._under_way = True
        try:
            version = self._required(version)
            if before is not None:
                before()
            # Copies of parameters that are trained would make buffers a part of their graph, which would grow with each refit.
            with working_on(self._endpoint.device), torch.no_grad():
                return self._refit(version, timeline)
        except BaseException as error:  # an interrupt, too: communicators with work under way can't be closed
            self._give_up(error)
            raise
        finally:
            self._under_way = False

    def recording_changes(self) -> AbstractContextManager[None]:
        """A context for whatever writes a trainer rank's weights between two refits, as an optimizer's step does.

        With ``delta_base: optimizer`` the next refit, if it is sparse, sends what has changed within such contexts. A copy of all that
        this rank sends is on its device meanwhile. All trainer ranks enter it together: at its end parameters are completed
        (:meth:`.weights.endpoints.WeightSource.prepare`). One within another, in the same thread, is a part of it. With another ``delta_base``, with ``delta: off`` and on generation
        ranks it does nothing.
        """
        config = self.engine.config
        if config.delta == "off" or config.delta_base != "optimizer" or not self.world.is_source:
            return nullcontext()
        return self.engine.recording_step()

    def healthy(self) -> bool:
        """Whether another refit can run: nothing has failed here, and no other rank has gone or given up."""
        if self._failed or self._closed:
            return False
        try:
            self._channel.check_abort("handshake")
        except RefitError as error:
            logger.warning("the epoch of %d ranks has ended: %s", self.world.size, error)
            self._failed = f"{type(error).__name__}: {error}"
            end_all([partial(self.engine.finalize, failed=True)], error)
            return False
        except BaseException as error:  # an interrupt: its answer would be taken for the next one
            self._give_up(error)
            raise
        return True

    def close(self) -> None:
        """End the epoch on this rank; safe to call twice. A refit that is under way, as where a signal's handler calls this, ends with an error."""
        if self._closed:
            return
        self._closed = True
        failed = self._under_way or bool(self._failed)
        end_all([partial(self.engine.finalize, failed=failed), self._channel.close])

    def _give_up(self, error: BaseException) -> None:
        """As the function of this name, after an error of a session that is open."""
        self._failed = f"{type(error).__name__}: {error}"
        steps: list[Callable[[], object]] = [partial(self.engine.finalize, failed=True)]
        if not self.world.is_source:
            steps.append(cast(WeightDestination, self._endpoint).abandon)
        try:
            _give_up(error, self._channel, steps, [self._draw_rest])
        except RefitError as cause:
            self._failed = f"{type(cause).__name__}: {cause}"
            raise
        if self._closed and isinstance(error, Exception) and not isinstance(error, RefitError):
            # Of whatever was no longer there.
            raise RefitError(
                "this session was closed while its refit was under way, by another thread or the handler of a signal. Engines that "
                "were being written stay dirty; refit in a new epoch",
                stage="close",
                rank=self.world.rank,
            ) from error

    def _draw_rest(self, cause: BaseException) -> None:
        if self.world.is_source and isinstance(cause, Exception):
            blamed = cause.blamed if isinstance(cause, RefitError) else -1
            self.engine.draw_rest(blamed)

    def _required(self, version: object) -> int:
        """A version as a number."""
        number = whole_number(version)
        if number is None:
            raise RefitError(
                f"the version is {version!r}, and no whole number from 0 on, by which weights are told apart. Nothing was written; give the "
                "trainer's step",
                stage="handshake",
                rank=self.world.rank,
            )
        return number

    def _refit(self, version: int, timeline: bool) -> RefitRecord:
        device, clock = self._endpoint.device, self._clock
        memory_before = _memory_mark(device)
        clock.restart(timeline=timeline)
        earlier = self.state.dirty_since
        flags = self._begin(version)
        self.engine.decide(flags)
        if flags & (_STALE | _UNPREPARED):
            # Nobody writes before all ranks have followed, and all trainer ranks prepared, and met again.
            self.state.take_back(earlier)
            self._follow(version, moved=bool(flags & _STALE))
        moved, void = self._move(version, may_be_void=True)
        if void:
            # Once more with all weights where they are now; nothing of it has been committed.
            self._follow(version, moved=True)
            self.engine.again()
            moved, void = self._move(version, may_be_void=False)
            if void:
                raise RefitError(
                    "a trainer's parameters lay elsewhere, or were written, once more when the refit was under way: something moves "
                    "or writes them meanwhile. Nothing was committed, and the engine stays dirty. Leave parameters where and as they "
                    "are until the refit has returned",
                    stage="transfer",
                    rank=self.world.rank,
                )
        if not self.world.is_source:
            self.state.commit(version)
        self.engine.commit(version)
        # Counted once it is over on all ranks: a refit that failed here has no successor in this epoch.
        self._refits += 1
        peak_extra_bytes = self._peak_extra_bytes(memory_before)
        seconds, intervals = clock.seconds, tuple(clock.intervals()) if timeline else ()
        return RefitRecord(
            version=version,
            epoch=self.world.epoch,
            rank=self.world.rank,
            role="trainer" if self.world.is_source else "generation",
            engine=self.engine.name,
            transport=self.engine.transport_name,
            bytes_bulk=moved.bytes_bulk,
            bytes_misc=moved.bytes_misc,
            bytes_kept=self._kept_bytes,
            bytes_verified=moved.bytes_verified,
            bytes_wire=moved.bytes_wire,
            changed_share=moved.changed_share,
            bytes_resharded=moved.bytes_resharded,
            handles_opened=self.engine.handles_opened(),
            # Last, so that they count what the record itself takes.
            seconds_total=clock.wall_seconds,
            host_seconds=clock.host_seconds,
            seconds=seconds,
            peak_extra_bytes=peak_extra_bytes,
            timeline=intervals,
        )

    def _follow(self, version: int, *, moved: bool) -> None:
        """Follow storages if they have ``moved`` on any rank, prepare the trainer's weights where they are now, and meet again."""
        self._follows += 1
        stage = "bind" if moved else "handshake"
        with self._clock.stage(stage):
            flags = self.engine.rebind() if moved else 0
        self._prepare()
        with self._clock.stage(stage):
            flags = self._meet_to_write(f"follow/{self._follows}", version, flags)
            if flags & DENSE:
                self.engine.again(flags)

    def _prepare(self) -> None:
        """Trainer ranks: have the source finish its weights; other ranks hear of it if it refuses."""
        if self.world.is_source:
            with self._clock.stage("export"):
                self.engine.prepare_source()

    def _move(self, version: int, *, may_be_void: bool) -> tuple[Moved, bool]:
        """Move all weights, and meet; what this rank moved, and whether it counts for nothing on any rank.

        ``may_be_void``: what is no number may be what lies where a trainer's weights no longer are, and is moved once more.
        """
        clock = self._clock
        if self.world.is_source:
            moved = self.engine.send_weights(version, clock)
        else:
            moved = self.engine.receive_weights(version, clock)
            destination = cast(WeightDestination, self._endpoint)
            if moved.void:
                destination.abandon()
            else:
                with clock.stage("post_load"):
                    destination.finish(version)
        with clock.waiting():
            self._await_device()
        void = (self.world.is_source and not self.engine.weights_held()) or moved.void
        if not self.world.is_source and not void:
            try:
                self.engine.require_finite()
            except RefitError:
                if not may_be_void:
                    raise
                void = True
        self._moves += 1
        with clock.stage("commit"), clock.waiting():
            void = bool(self._channel.barrier(f"commit/{self._moves}", void))
        return moved, void

    def _begin(self, version: int) -> int:
        """Meet all ranks over the version; returns the flags of any: whether storages moved, who has not prepared, what is wished.

        The meeting is counted and not named by version: ranks that disagree on the version must still meet.
        """
        with self._clock.stage("handshake"):
            moved = self.engine.stale()
            held = None if self.state.dirty else self.state.version
            flags = self.engine.wishes(held, bound=not moved) | (_STALE if moved else 0)
            # Where memory moves each time, as of engines that sleep, the second meeting comes anyway: preparing twice would not pay.
            if self.world.is_source and (self._moved_before or not prepares_alone(self._endpoint)):
                flags |= _UNPREPARED
        if not flags & (_STALE | _UNPREPARED):
            # One that refuses never comes to the meeting, so that nobody has written.
            self._prepare()
        with self._clock.stage("handshake"):
            flags = self._meet_to_write(f"begin/{self._refits}", version, flags)
        self._moved_before = bool(flags & _STALE)
        return flags

    def _meet_to_write(self, topic: str, version: int, flags: int = 0) -> int:
        """Meet all ranks, after which senders write; returns the flags that are set on any rank.

        They may do so before this rank hears that all have come. So an engine is dirty from before it says that it is
        there, and stays so if it does not hear, unless the rendezvous itself has answered that it let no rank through.
        """
        earlier = self.state.dirty_since
        if not self.world.is_source:
            self.state.mark_dirty(version)
        try:
            with self._clock.waiting():
                return self._channel.barrier(topic, flags, version)
        except BaseException:
            if self._channel.held_back == topic:
                self.state.take_back(earlier)
            raise

    def _await_device(self) -> None:
        """Wait until the device has done this refit's work: only then has this rank sent or written all."""
        device = self._endpoint.device
        if device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        limit = self._channel.timeout_s

        def late() -> RefitTimeout:
            return RefitTimeout(
                f"the device did not finish this refit's work within {limit:.0f} s. One of its kernels, or one queued "
                "before them, hangs. Raise policy.refit.timeout_s if other work on the same stream takes that long",
                stage="transfer",
                rank=self.world.rank,
            )

        wait_until(done.query, limit, "transfer", self._channel.check_abort, late)

    def _peak_extra_bytes(self, memory_before: int) -> int:
        """What is held between refits, and the larger of what this one is known and was seen to take beside it."""
        held, seen = self.engine.held_bytes, _memory_peak(self._endpoint.device) - memory_before
        return held + max(self.engine.staging_bytes - held, seen)


def _give_up(
    error: BaseException,
    channel: Channel,
    steps: Sequence[Callable[[], object]],
    last: Sequence[Callable[[BaseException], object]],
) -> None:
    """Tell all ranks that this one has ended with an error, which the caller raises, and close what is open.

    Args:
        error: of this rank.
        channel: of the epoch.
        steps: that close its wires.
        last: what follows once it is known why, which these are given.

    Raises:
        RefitError: why another rank gave up first, if the error only follows from that.
    """
    causes = [error]
    asking = partial(_add_cause, causes, channel)
    try:
        following = [partial(_with_cause, causes, step) for step in last]
        end_all([partial(channel.give_up, error), *steps, asking, *following], error)
        if causes[-1] is not error:
            raise causes[-1] from error
    finally:
        # The traceback keeps this frame: an error in it would keep itself, and with it all that the refit held.
        causes.clear()


def _add_cause(causes: list[BaseException], channel: Channel) -> None:
    causes.append(channel.cause_of(causes[0]))


def _with_cause(causes: Sequence[BaseException], step: Callable[[BaseException], object]) -> None:
    step(causes[-1])


def _agree_on_settings(channel: Channel, engine: str, config: RefitConfig) -> None:
    """Check that all ranks were set up alike; as :func:`.config.require_equal_settings`, on every rank."""
    ours = {"engine": engine, **asdict(config)}
    for own in ("timeout_s", "port"):
        del ours[own]
    world = channel.world
    require_equal_settings(
        channel.vote("settings", ours),
        world.describe,
        remedy="Give all ranks the same policy.refit values and engine, and the same rlrefit",
        stage="settings",
        rank=world.rank,
    )


def _memory_mark(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return _allocated(device, "current")


def _memory_peak(device: torch.device) -> int:
    return _allocated(device, "peak") if device.type == "cuda" else 0


def _allocated(device: torch.device, when: str) -> int:
    # Not torch.cuda.memory_allocated, which flattens hundreds of statistics to return one: a third of a millisecond.
    found: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"][when]
    return found
