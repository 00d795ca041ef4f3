"""``packed_broadcast``: the conventional path. Every weight, gathered in full, goes to every engine rank."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from ..broadcast.packed import PackedBroadcast
from ..comm.torch_group import Group
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..layout import Fragment
from ..records.record import StageClock
from ..weights.endpoints import WeightDestination, WeightSource
from ..weights.manifest import Manifest, ManifestEntry
from ..weights.scale_watch import ScaleWatch
from .agreement import agree_on_digest, agree_on_specs, make_packed_broadcast, specs_digest
from .base import CheckpointEngine, SendResult
from .formats import agree_on_formats, require_stored_so
from .unchanged import AgreedFragments


class PackedBroadcastEngine(CheckpointEngine):
    """The trainer's full export, packed in buckets, into the engine's own ``load_weights``."""

    name = "packed_broadcast"

    def __init__(self, config: RefitConfig, world: RefitWorld, channel: Channel):
        super().__init__(config, world, channel)
        self._group: Group | None = None

    def prepare(self, endpoint: WeightSource | WeightDestination) -> Manifest:
        specs = agree_on_specs(self.channel, endpoint)
        endpoint, specs, formats = agree_on_formats(self.channel, self.config, endpoint, specs)
        self._endpoint = endpoint
        self._scales = ScaleWatch(formats, self.world.rank)
        agree_on_digest(self.channel, "specs_digest", specs_digest(specs, self.config))
        fragments: list[Fragment] = []
        refused: dict[str, str] = {}
        if not self.world.is_source:
            # The engine checks here that the weights fill it, before anything is written.
            fragments, refused = cast(WeightDestination, endpoint).fragments(specs)
            require_stored_so(self.channel, fragments, formats)
        self._agreed = AgreedFragments(fragments, refused)
        reason = "policy.nccl_xfer_refit is false: the conventional path carries everything"
        self.manifest = Manifest(tuple(ManifestEntry(spec, "misc", reason) for spec in specs))
        return self.manifest

    def init_process_group(self) -> None:
        self._broadcast: PackedBroadcast
        self._broadcast, self._group = make_packed_broadcast(
            self.channel, self.manifest.specs(), self.config, self._endpoint.device
        )
        if not self.world.is_source:
            self._scales.bind([], self.manifest.specs(), self._endpoint.device)
            self._storage: Hashable = self._endpoint.storage_key()

    def stale(self) -> bool:
        # The engine's loader writes where it saw its parameters last. The trainer exports anew in each refit.
        return not self.world.is_source and self._endpoint.storage_key() != self._storage

    def rebind(self) -> None:
        self._agreed.again(self.channel, self._fragments)
        if not self.world.is_source:
            self._storage = self._endpoint.storage_key()

    def _fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        if self.world.is_source:
            return [], {}
        return cast(WeightDestination, self._endpoint).fragments(self.manifest.specs())

    def send_weights(self, version: int, clock: StageClock) -> SendResult:
        source = cast(WeightSource, self._endpoint)
        self._broadcast.send(source.export([spec.name for spec in self.manifest.specs()]), clock)
        return SendResult(0, self._broadcast.nbytes if self.world.rank == 0 else 0, 0)

    def receive_weights(self, version: int, clock: StageClock) -> SendResult:
        destination = cast(WeightDestination, self._endpoint)
        self._broadcast.load(lambda weights: destination.load_weights(self._scales.passing(weights)), clock)
        if self._scales.watches:
            with clock.stage("verify"):
                self._scales.look()
        return SendResult(0, self._broadcast.nbytes, self._broadcast.verified_bytes)

    def require_finite(self) -> None:
        self._scales.require_finite()

    def finalize(self, *, failed: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(failed=failed)

    @property
    def transport_name(self) -> str:
        return "broadcast"

    @property
    def staging_bytes(self) -> int:
        return self.held_bytes + self._broadcast.staging_bytes

    @property
    def held_bytes(self) -> int:
        return self._scales.nbytes
