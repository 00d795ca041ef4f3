"""The refit engine: how weights get from a trainer's ranks into an engine's, once per refit.

Bulk weights go shard to shard. All others go over the packed broadcast: gathered in full, into the engine's own
``load_weights``. On the conventional path that is every weight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from ..broadcast.packed import PackedBroadcast
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..delta.choice import DENSE
from ..errors import RefitError, end_all
from ..layout import Fragment
from ..records.clock import StageClock
from ..transport import ONE_SIDED, TransferResult
from ..transport.streams import working_on
from ..weights.endpoints import (
    Look,
    TellsWhatItRewrites,
    WeightDestination,
    WeightSource,
    gives_memory_back,
    prepare_ahead,
    prepares_alone,
    rewritten,
    working_on_portions,
)
from ..weights.manifest import Manifest
from ..weights.packing_experts import scales_of_packed
from ..weights.scale_watch import ScaleWatch
from ..weights.source_thread import SourceThread
from .bulk import BulkPath
from .epoch_plan import EpochPlan, Way, plan_epoch
from .shared_scales import SharedScales

logger = logging.getLogger(__name__)

# Of an export that goes beside the bulk path: above the routers of the largest model that fits on one host.
_MOST_URGENT_BYTES = 128 << 20


# By the names that callers give and records hold.
WAYS = {
    "nccl_xfer": Way(),
    "colocated_ipc": Way(shared_memory=True),
    "packed_broadcast": Way(all_misc=True),
}


@dataclass(frozen=True)
class Moved:
    """What one rank moved in one refit, in bytes; ``void`` if all of it counts for nothing, and has to be moved again.

    ``bytes_wire`` is what travelled of it, and ``changed_share`` the share of bulk elements that differed, after a sparse refit.
    ``bytes_resharded`` is what ``nccl.m2n`` carried of the bulk.
    """

    bytes_bulk: int
    bytes_misc: int
    bytes_verified: int
    void: bool = False
    bytes_wire: int = 0
    changed_share: float | None = None
    bytes_resharded: int = 0


class RefitEngine:
    """Compiles both sides' fragments into a plan once per epoch and replays it every refit.

    Lifecycle: ``prepare`` → ``init_process_group`` → (``send_weights`` | ``receive_weights``)* → ``finalize``. The first two
    run once per epoch, on all ranks at the same time.

    Args:
        name: one of :data:`WAYS`.
        config: the same on all ranks, but for ``timeout_s`` and ``port``.
        world: membership seen from this rank.
        channel: of the epoch.

    Raises:
        RefitError: there is no way of that name; lists those that there are.
    """

    def __init__(self, name: str, config: RefitConfig, world: RefitWorld, channel: Channel):
        if name not in WAYS:
            raise RefitError(
                f"there is no refit engine {name!r}; use {', '.join(WAYS)}", stage="settings", rank=world.rank
            )
        self.name = name
        self.way = WAYS[name]
        self.config = config
        self.world = world
        self.channel = channel
        self.planned: EpochPlan
        self._chosen = ("broadcast", "") if self.way.all_misc else (config.transport, "")
        self._bulk: BulkPath | None = None
        self._misc: PackedBroadcast | None = None
        self._shared_scales: SharedScales | None = None
        self._urgent: torch.cuda.Stream | None = None
        self._source_thread: SourceThread | None = None
        # Of a source that was prepared by what its weights were, and what tells of the look whether they still are.
        self._look: Look | None = None
        self._answer: Callable[[], bool] | None = None
        # What a refit under way has not drawn yet of the export; None if there is none.
        self._undrawn: Iterator[tuple[str, torch.Tensor]] | None = None
        # Threads within a recorded step.
        self._recording: set[int] = set()

    def prepare(self, endpoint: WeightSource | WeightDestination) -> Manifest:
        """Learn what exists on all ranks and agree on it; raises as :func:`~.epoch_plan.plan_epoch`."""
        self.planned, self._initial = plan_epoch(self.name, self.way, self.config, self.channel, endpoint)
        self._endpoint, self.manifest = self.planned.endpoint, self.planned.manifest
        if self.planned.bulk is not None:
            self._chosen = self.planned.bulk.transport
        self._scales = ScaleWatch(
            self.planned.formats, self.world.rank, scales_of_packed(self.manifest.specs())
        )
        return self.manifest

    def init_process_group(self) -> None:
        """Make communicators and buffers."""
        device = self._endpoint.device
        fragments, self._initial = self._initial, []
        engine = working_on_portions(self._endpoint)
        group, bulk = self.planned.group, self.planned.bulk
        if bulk is not None:
            self._bulk = BulkPath(
                self.channel,
                group,
                self.planned.delta_groups,
                self.config,
                device,
                bulk.plan,
                bulk.transport,
                fragments,
                sleeps=gives_memory_back(self._endpoint),
                rewritten={}
                if self.world.is_source or self.config.delta == "off"
                else rewritten(self._endpoint, self.manifest.specs("bulk")),
                source=cast(WeightSource, self._endpoint) if self.world.is_source else None,
                landed=None if engine is None else engine.landed,
                as_planned=self.planned.as_planned,
            )
            self._shared_scales = SharedScales.open(self.channel, group, bulk.cut_slots, device)
            if self._shared_scales is not None:
                self._shared_scales.bind(fragments)
        self._expect()
        self._watch_scales(fragments)
        self._storage = self._storage_now()
        misc = self.manifest.specs("misc")
        # Kept, since a refit must not walk through thousands of weights.
        self._misc_names = [spec.name for spec in misc]
        self._misc = PackedBroadcast.open(
            self.channel,
            group,
            misc,
            self.config,
            device,
            sleeps=bool(gives_memory_back(self._endpoint)),
        )

    def stale(self) -> bool:
        """Whether storage on this rank has moved since it was bound; asked at the beginning of each refit."""
        if self.way.all_misc:
            return self._have_moved()
        self._open_bulk.synchronize()
        if self._open_bulk.moved():
            return True
        # A trainer looks through all its parameters while their bytes are on their way, where that can do no harm.
        # An engine has to know before anyone writes.
        if self.world.is_source and self._open_bulk.check_during_run(self._have_moved):
            return False
        moved = self._have_moved()
        if not moved:
            self._open_bulk.confirm_unmoved()
        return moved

    def _have_moved(self) -> bool:
        # Parameters move when they are offloaded and brought back; old views would read freed memory.
        return self._storage_now() != self._storage

    def _storage_now(self) -> Hashable:
        """What tells moved storage. An export is made anew in each refit, so that alone needs no look."""
        return None if self.way.all_misc and self.world.is_source else self._endpoint.storage_key()

    def wishes(self, held: int | None, *, bound: bool) -> int:
        """Flags of this rank for the meeting before a refit: whether it has to be dense.

        Args:
            held: the version that an engine rank holds, if it is clean.
            bound: whether :meth:`stale` has found weights where they were bound.
        """
        return self._bulk.wishes(held, bound=bound) if self._bulk is not None else 0

    @contextmanager
    def recording_step(self) -> Iterator[None]:
        """Trainer ranks: a context in which the weights are written, and at whose end they are complete on all ranks.

        One within another of the same thread is a part of it, as where one optimizer's step calls another's.
        """
        thread = threading.get_ident()
        if thread in self._recording:
            yield
            return
        self._recording.add(thread)
        try:
            with self._bulk.recording_step() if self._bulk is not None else nullcontext():
                yield
                # On all ranks or on none, whatever became of the epoch on one of them: it may be a collective.
                with working_on(self._endpoint.device):
                    cast(WeightSource, self._endpoint).prepare()
        finally:
            self._recording.discard(thread)

    def decide(self, flags: int) -> None:
        """Choose between a dense and a sparse refit, from what all ranks wish."""
        if self._bulk is not None:
            self._bulk.decide(flags)

    def again(self, flags: int = 0) -> None:
        """What is moved next has to be dense: what was moved counts for nothing, or ``flags`` of all ranks say so."""
        if self._bulk is not None:
            self._bulk.again(flags)

    def commit(self, version: int) -> None:
        """All ranks hold ``version``."""
        if self._bulk is not None:
            self._bulk.commit(version)

    # Not in inference mode, outside of which nothing could write later what is made in it; the same in RefitSession.open().
    @torch.inference_mode(False)
    @torch.no_grad()
    def rebind(self) -> int:
        """Follow moved storages. A collective: called on all ranks if any is stale, before the engine is dirty.

        Returns:
            Flags of an engine's rank that may hold other weights than the last refit left (:mod:`..delta.choice`): they lie
            elsewhere now, or were found to be others.

        Raises:
            RefitMismatch: on every rank, if a weight changed on any beyond its place: its shape, its box or its dtype.
        """
        fragments = self.planned.fragments_now(self.channel)
        if self._bulk is not None:
            self._bulk.bind(fragments)
            self._expect()
        if self._shared_scales is not None:
            self._shared_scales.bind(fragments)
        storage = self._storage_now()
        moved = storage != self._storage  # and not a peer's alone
        if moved:
            self._watch_scales(fragments)
        self._storage = storage
        if self.world.is_source or self._bulk is None:
            return 0
        return DENSE if moved else self._bulk.lost()

    def _expect(self) -> None:
        """Tell an engine that works on portions what lands when."""
        if (engine := working_on_portions(self._endpoint)) is not None:
            engine.expect({} if self._bulk is None else self._bulk.portions)

    def prepare_source(self) -> None:
        """Trainer ranks: finish the weights, before any rank sends.

        Raises:
            RefitError: this rank can't send them, or another trainer rank ended as this one waited for it.
        """
        encoded = frozenset[str]() if self._bulk is None else self._bulk.encodes_wholly
        prepare = partial(prepare_ahead, cast(WeightSource, self._endpoint), encoded)
        if self._waits_on_host and not prepares_alone(self._endpoint):
            self._look = self._thread.run(prepare, "export")
        else:
            self._look = prepare()

    def send_weights(self, version: int, clock: StageClock) -> Moved:
        """Trainer ranks: send all weights once."""
        source, misc = cast(WeightSource, self._endpoint), self._open_misc
        if self._misc_names:
            self._undrawn = _lazily(source, self._misc_names)

        def beside() -> None:
            if self._undrawn is not None:
                with self._beside_bulk():
                    drawn = self._thread.draw(self._undrawn) if self._waits_on_host else self._undrawn
                    misc.send(drawn, clock)
                self._undrawn = None
            if self._look is not None:
                with self._beside_bulk(), clock.stage("verify"):
                    self._answer = self._look()

        if self._shared_scales is not None:
            with clock.stage("export"):
                self._shared_scales.make()
        bulk = self._run(clock, beside)
        sends_misc = misc.nbytes if self.world.rank == 0 else 0
        return _moved(bulk, sends_misc, bulk.verified_bytes)

    def weights_held(self) -> bool:
        """Trainer ranks, once the device has done a refit's work and before it commits: whether the weights were those that were prepared.

        What was sent is of no use to an engine if they were not.
        """
        answer, self._answer = self._answer, None
        return answer is None or answer()

    def draw_rest(self, ended_by: int) -> None:
        """Trainer ranks, after a refit that failed: draw what is left of its export, so that none stays in a collective.

        All trainer ranks do, unless one failed in the export itself; the others can't draw on then, and give up here.

        Args:
            ended_by: refit rank that is to blame for the end, or -1.
        """
        undrawn, self._undrawn = self._undrawn, None
        if undrawn is None or (self._source_thread is not None and self._source_thread.left):
            return
        if not self._waits_on_host and ended_by < self.world.train_ranks:
            # A GPU would wait for a trainer rank that has gone, and all that is queued behind.
            return
        try:
            for _ in self._thread.draw(undrawn):
                pass
        except Exception as error:
            logger.warning(
                "%s could not draw its export to the end, so the trainer's ranks may be out of step: %s: %s",
                self.world.describe(self.world.rank),
                type(error).__name__,
                error,
            )
        finally:
            self._thread.close()

    def receive_weights(self, version: int, clock: StageClock) -> Moved:
        """Generation ranks: receive all weights once, into live storage or the engine's loader."""
        destination, misc = cast(WeightDestination, self._endpoint), self._open_misc

        def load_misc() -> None:
            if self._misc_names:
                misc.load(lambda weights: destination.load_weights(self._scales.passing(weights)), clock)

        bulk = self._run(clock, load_misc)
        if self._scales.watches:
            with clock.stage("verify"):
                self._scales.look()
        verified = bulk.verified_bytes + misc.verified_bytes
        return _moved(bulk, misc.nbytes, verified)

    @property
    def _waits_on_host(self) -> bool:
        """Whether collectives of the trainer's hold the thread up that makes them: a GPU's are only queued."""
        return self._endpoint.device.type == "cpu"

    @property
    def _thread(self) -> SourceThread:
        if self._source_thread is None:
            self._source_thread = SourceThread(
                self._endpoint.device,
                self.channel.timeout_s,
                self.world.rank,
                self.world.train_ranks,
                self.channel.check_abort,
            )
        return self._source_thread

    def _run(self, clock: StageClock, move_misc: Callable[[], None]) -> TransferResult:
        if self.way.all_misc:
            move_misc()
            return TransferResult(0, 0)
        return self._open_bulk.run(clock, move_misc)

    def handles_opened(self) -> int:
        """Handles of peers' GPU memory that this rank has opened since this was last asked."""
        return 0 if self.way.all_misc else self._open_bulk.handles_opened()

    def require_finite(self) -> None:
        """Generation ranks, once the device has done a refit's work and before it commits: refuse weights that are no numbers.

        Raises:
            RefitError: names the first such weight.
        """
        self._scales.require_finite()

    def _watch_scales(self, fragments: Sequence[Fragment]) -> None:
        """Where they land in place; the others are seen as they are loaded."""
        if not self.world.is_source:
            bulk = self.manifest.specs("bulk")
            names = {spec.name for spec in bulk}
            placed = (fragment for fragment in fragments if fragment.name in names)
            # An engine that says nothing is taken to leave scales as they land, or at least in their places.
            moved = self._endpoint.rewritten(bulk) if isinstance(self._endpoint, TellsWhatItRewrites) else ()
            self._scales.bind(placed, self.manifest.specs("misc"), self._endpoint.device, moved)

    @contextmanager
    def _beside_bulk(self) -> Iterator[None]:
        """A stream on which kernels overtake the bulk path's, which would else hold up a small export to their end.

        Not for a large export: what Bridge allocates for it would stay with that stream, and the trainer could not use
        the memory again.
        """
        device = self._endpoint.device
        if self.way.all_misc or device.type != "cuda" or self._open_misc.nbytes > _MOST_URGENT_BYTES:
            yield
            return
        if self._urgent is None:
            self._urgent = torch.cuda.Stream(device, priority=-1)
        caller = torch.cuda.current_stream(device)
        self._urgent.wait_stream(caller)
        try:
            with torch.cuda.stream(self._urgent):
                yield
        finally:
            # Even if it broke off: buckets that are freed then become memory of the caller's stream.
            caller.wait_stream(self._urgent)

    def finalize(self, *, failed: bool = False) -> None:
        """Close communicators and free buffers; safe to call twice. ``failed``: peers may be gone."""
        opened = (self._bulk, self._shared_scales, self._misc)
        self._bulk = self._shared_scales = self._misc = None
        if self._source_thread is not None:
            self._source_thread.close()
        end_all(partial(one.close, failed=failed) for one in opened if one is not None)

    @property
    def transport_name(self) -> str:
        """What carries the bulk of the bytes, for records: ``ipc``, ``pull``, ``p2p``, ``m2n``, ``golden``, ``buckets`` or ``broadcast``."""
        name = self._bulk.name if self._bulk is not None else self._chosen[0]
        return "buckets" if name == "p2p" and self.way.shared_memory else name

    @property
    def transport_reason(self) -> str:
        """Why it is that one, for the log; nothing where no other could be."""
        reason = self._bulk.reason if self._bulk is not None else self._chosen[1]
        if not self.way.shared_memory or self.transport_name in ONE_SIDED:
            return reason
        # The reason may already name two ranks of one GPU.
        group = self.planned.group
        return f"{reason}; {group.how if group.why in reason else group.reason}"

    @property
    def staging_bytes(self) -> int:
        """Bytes of buffers on this rank at their largest."""
        return self.held_bytes + self._open_misc.taken_bytes

    @property
    def base_bytes(self) -> int:
        """Bytes of what this rank keeps to compare its weights with, on the device or in host memory."""
        return self._bulk.base_bytes if self._bulk is not None else 0

    @property
    def held_bytes(self) -> int:
        """Those of :attr:`staging_bytes` that are held between refits; the others are taken anew in each."""
        bulk = self._bulk.staging_bytes + self._bulk.base_bytes if self._bulk is not None else 0
        misc = self._misc.held_bytes if self._misc is not None else 0
        return bulk + misc + self._scales.nbytes

    @property
    def _open_bulk(self) -> BulkPath:
        return self._opened(self._bulk)

    @property
    def _open_misc(self) -> PackedBroadcast:
        return self._opened(self._misc)

    def _opened[T](self, one: T | None) -> T:
        if one is None:
            raise RefitError(
                "the engine's communicators are not open: call init_process_group after prepare",
                stage="transfer",
                rank=self.world.rank,
            )
        return one


def _lazily(source: WeightSource, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """An export that begins when it is drawn, also one that gathers everything as it is called."""
    yield from source.export(names)


def _moved(bulk: TransferResult, bytes_misc: int, bytes_verified: int) -> Moved:
    wire = bulk.payload_bytes if bulk.wire_bytes is None else bulk.wire_bytes
    return Moved(
        bulk.payload_bytes,
        bytes_misc,
        bytes_verified,
        bulk.void,
        wire + bytes_misc,
        bulk.changed_share,
        bulk.resharded_bytes,
    )
