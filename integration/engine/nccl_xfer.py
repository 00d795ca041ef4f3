"""``nccl_xfer``: bulk weights shard to shard, everything else over the packed broadcast."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from ..broadcast.packed import PackedBroadcast
from ..comm.shared.opening import gpu_identity
from ..comm.torch_group import Group
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld, host_identity
from ..endings import end_all
from ..errors import RefitError
from ..layout import Fragment
from ..plan import GLOO_PACE, NCCL_PACE, BroadcastPlan, Plan, Topology, analyse, plan_broadcast
from ..records.record import StageClock
from ..transport import choose, facts
from ..weights.endpoints import WeightDestination, WeightSource, gives_memory_back, holdings_of
from ..weights.holdings import Holdings, HoldingsReader, SpecTable
from ..weights.manifest import Manifest, TensorSpec
from ..weights.scale_watch import ScaleWatch
from .agreement import agree_on_plan, agree_on_specs, make_packed_broadcast, make_shared_scales
from .base import CheckpointEngine, SendResult
from .bulk import BulkPath
from .formats import agree_on_formats, require_stored_so
from .misc_share import warn_of_misc
from .shared_scales import CutSlots, SharedScales
from .unchanged import AgreedFragments

# Of an export that goes beside the bulk path: above the routers of the largest model that fits on one host.
_MOST_URGENT_BYTES = 128 << 20


class NcclXferEngine(CheckpointEngine):
    """Compiles both sides' fragments into a plan once per epoch and replays it every refit."""

    name = "nccl_xfer"

    def __init__(self, config: RefitConfig, world: RefitWorld, channel: Channel):
        super().__init__(config, world, channel)
        self._chosen = (config.transport, "")
        self._bulk: BulkPath | None = None
        self._misc_group: Group | None = None
        self._shared_scales: SharedScales | None = None
        self._urgent: torch.cuda.Stream | None = None

    def prepare(self, endpoint: WeightSource | WeightDestination) -> Manifest:
        specs = agree_on_specs(self.channel, endpoint)
        endpoint, specs, formats = agree_on_formats(self.channel, self.config, endpoint, specs)
        self._endpoint = endpoint
        self._scales = ScaleWatch(formats, self.world.rank)
        table = SpecTable(specs)
        fragments, refused = self._fragments(endpoint, table.specs)
        if not self.world.is_source:
            require_stored_so(self.channel, fragments, formats)
        who = self.world.describe(self.world.rank)
        ours = holdings_of(self.world.rank, fragments, refused, table, who)
        answers, everyone = self._tell_holdings(ours, table, endpoint.device)
        self._chosen = choose(
            self.config.transport, [answer["gpu"] for answer in answers], self.world.train_ranks
        )
        sources = [everyone[rank] for rank in self.world.sources]
        destinations = [everyone[rank] for rank in self.world.destinations]
        self.analysis = analyse(
            table.specs,
            sources,
            destinations,
            bucket_bytes=self.config.bucket_bytes,
            topology=Topology.of_hosts(
                [answer["host"] for answer in answers], [gpu_identity(answer["gpu"]) for answer in answers]
            ),
            # One-sided, every sender reaches every receiver, and none passes anything on.
            fan_out=False if self._chosen[0] == "ipc" else None,
            pace=NCCL_PACE if endpoint.device.type == "cuda" else GLOO_PACE,
        )
        self.manifest: Manifest = self.analysis.manifest
        if self.world.rank == 0:
            warn_of_misc(self.manifest, formats)
        self._cut_slots = CutSlots.find(self.analysis.classes, table.specs, formats)
        self.plan: Plan | BroadcastPlan
        pairs: dict[tuple[int, int], str] = {}
        digest = self.analysis.digest
        if self._chosen[0] == "golden":
            self.plan = plan_broadcast(self.manifest, sources, self.config.bucket_bytes)
            digest += self.plan.digest
        else:
            self.plan = self.analysis.compile(self.world.rank)
            pairs = self.plan.pair_digests
        # With what is checked, since a checksum that one side writes has to be read by the other.
        agree_on_plan(self.channel, digest + self.config.verify, pairs)
        self._initial = fragments
        self._agreed = self._agreed_of(fragments, refused)
        return self.manifest

    def init_process_group(self) -> None:
        device = self._endpoint.device
        fragments, self._initial = self._initial, []
        self._bulk = BulkPath(
            self.channel,
            self.config,
            device,
            self.plan,
            self._chosen,
            fragments,
            lends=gives_memory_back(self._endpoint),
        )
        self._watch_scales(fragments)
        self._shared_scales = make_shared_scales(self.channel, self._cut_slots, device)
        if self._shared_scales is not None:
            self._shared_scales.bind(fragments)
        self._storage: Hashable = self._endpoint.storage_key()
        misc = self.manifest.specs("misc")
        # Kept, since a refit must not walk through thousands of weights.
        self._misc_names = [spec.name for spec in misc]
        self._misc: PackedBroadcast
        self._misc, self._misc_group = make_packed_broadcast(self.channel, misc, self.config, device)

    def stale(self) -> bool:
        self._open_bulk.settle()
        if self._open_bulk.moved():
            return True
        # A trainer looks through all its parameters while their bytes are on their way, where that can do no harm.
        # An engine has to know before anyone writes.
        if self.world.is_source and self._open_bulk.will_look(self._have_moved):
            return False
        moved = self._have_moved()
        if not moved:
            self._open_bulk.found_again()
        return moved

    def _have_moved(self) -> bool:
        # Parameters move when they are offloaded and brought back; old views would read freed memory.
        return self._endpoint.storage_key() != self._storage

    def rebind(self) -> None:
        fragments = self._agreed.again(
            self.channel, lambda: self._fragments(self._endpoint, self.manifest.specs())
        )
        self._open_bulk.bind(fragments)
        if self._shared_scales is not None:
            self._shared_scales.bind(fragments)
        storage = self._endpoint.storage_key()
        if storage != self._storage:  # and not a peer's alone
            self._watch_scales(fragments)
        self._storage = storage

    def send_weights(self, version: int, clock: StageClock) -> SendResult:
        source = cast(WeightSource, self._endpoint)

        def send_misc() -> None:
            if self._misc_names:
                with self._beside_bulk():
                    self._misc.send(source.export(self._misc_names), clock)

        if self._shared_scales is not None:
            with clock.stage("export"):
                self._shared_scales.settle()
        bulk = self._open_bulk.run(clock, send_misc)
        sends_misc = self._misc.nbytes if self.world.rank == 0 else 0
        return SendResult(bulk.payload_bytes, sends_misc, bulk.verified_bytes, bulk.void)

    def receive_weights(self, version: int, clock: StageClock) -> SendResult:
        destination = cast(WeightDestination, self._endpoint)

        def load_misc() -> None:
            if self._misc_names:
                self._misc.load(
                    lambda weights: destination.load_weights(self._scales.passing(weights)), clock
                )

        bulk = self._open_bulk.run(clock, load_misc)
        if self._scales.watches:
            with clock.stage("verify"):
                self._scales.look()
        return SendResult(
            bulk.payload_bytes, self._misc.nbytes, bulk.verified_bytes + self._misc.verified_bytes, bulk.void
        )

    def require_finite(self) -> None:
        self._scales.require_finite()

    def _watch_scales(self, fragments: Sequence[Fragment]) -> None:
        """Where they land in place; the others are seen as they are loaded."""
        if not self.world.is_source:
            bulk = {spec.name for spec in self.manifest.specs("bulk")}
            placed = (fragment for fragment in fragments if fragment.name in bulk)
            self._scales.bind(placed, self.manifest.specs("misc"), self._endpoint.device)

    @contextmanager
    def _beside_bulk(self) -> Iterator[None]:
        """A stream on which kernels overtake the bulk path's, which would else hold up a small export to their end.

        Not for a large export: what Bridge allocates for it would stay with that stream, and the trainer could not use
        the memory again.
        """
        device = self._endpoint.device
        if device.type != "cuda" or self._misc.nbytes > _MOST_URGENT_BYTES:
            yield
            return
        if self._urgent is None:
            self._urgent = torch.cuda.Stream(device, priority=-1)
        caller = torch.cuda.current_stream(device)
        self._urgent.wait_stream(caller)
        with torch.cuda.stream(self._urgent):
            yield
        caller.wait_stream(self._urgent)

    def finalize(self, *, failed: bool = False) -> None:
        opened = (self._bulk, self._shared_scales, self._misc_group)
        self._bulk = self._shared_scales = self._misc_group = None
        end_all(partial(one.close, failed=failed) for one in opened if one is not None)

    @property
    def transport_name(self) -> str:
        return self._bulk.name if self._bulk is not None else self._chosen[0]

    @property
    def transport_reason(self) -> str:
        return self._bulk.reason if self._bulk is not None else self._chosen[1]

    @property
    def staging_bytes(self) -> int:
        return self.held_bytes + self._misc.staging_bytes

    @property
    def held_bytes(self) -> int:
        return self._open_bulk.staging_bytes + self._scales.nbytes

    @property
    def _open_bulk(self) -> BulkPath:
        if self._bulk is None:
            raise RefitError(
                "the engine's communicators are not open: call init_process_group after prepare",
                stage="transfer",
                rank=self.world.rank,
            )
        return self._bulk

    def _agreed_of(self, fragments: list[Fragment], refused: Mapping[str, str]) -> AgreedFragments:
        if self.world.is_source:
            # The others travel as the export gives them, which is checked as it is drawn.
            return AgreedFragments(fragments, {e.spec.name for e in self.manifest if e.route != "bulk"})
        # An engine's own loader writes where its fragments lie, too.
        return AgreedFragments(fragments, refused)

    def _tell_holdings(
        self, ours: Holdings, table: SpecTable, device: torch.device
    ) -> tuple[list[dict[str, Any]], list[Holdings]]:
        """Every rank's host and GPU, and what it holds. Groups are told one by one, since many ranks hold the same."""
        place = {"host": host_identity(), "gpu": facts(device)}
        told = self.channel.vote_parts("holdings", [place, *ours.to_parts()])
        read = HoldingsReader(table)
        return [row[0] for row in told], [read.holdings(rank, row[1:]) for rank, row in enumerate(told)]

    def _fragments(
        self, endpoint: WeightSource | WeightDestination, specs: list[TensorSpec]
    ) -> tuple[list[Fragment], dict[str, str]]:
        if self.world.is_source:
            return cast(WeightSource, endpoint).fragments()
        return cast(WeightDestination, endpoint).fragments(specs)
