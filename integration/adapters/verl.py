"""verl's checkpoint engine ``nccl_xfer``, over the full tensors that any of verl's training engines exports.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: nccl_xfer
      custom_backend_module: rlrefit.integration.adapters.verl

verl imports the module on the driver, on actors and on rollout workers, and it registers itself there. verl asks for a
process group before every update; the one of the last update serves again as long as the same workers take part and
none has failed, and else an epoch of its own begins.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import base as verl_base

from ..config import LONGEST_TIMEOUT_S, VERIFY_MODES
from ..errors import RefitError, RefitMismatch
from ..records import RefitRecord
from ..rendezvous import Rendezvous, RendezvousServer, listen
from .full_tensor_epoch import FullTensorEpoch, FullTensorSettings, Weights
from .verl_contract import require_supported

require_supported(verl_base)

logger = logging.getLogger(__name__)

BACKEND = "nccl_xfer"
# Of what workers and driver tell each other; raised when that changes.
_PROTOCOL = 1


@dataclass(frozen=True)
class VerlOptions:
    """``checkpoint_engine.engine_kwargs.nccl_xfer``.

    Attributes:
        timeout_s: seconds that any wait for another worker may take; the error names the worker.
        verify: checksums of what arrives against what was sent: ``off``, ``sampled`` (one bucket of an update, another
            one each time) or ``full``.
        records_dir: folder for ``refits-<role>-<rank>.jsonl``, a line an update; null for none.
        port: TCP port of the rendezvous on actor rank 0; 0 takes any free one.
    """

    timeout_s: float = 300.0
    verify: str = "sampled"
    records_dir: str | None = None
    port: int = 0

    @staticmethod
    def from_kwargs(bucket_size: int, given: dict[str, Any]) -> VerlOptions:
        """The options, checked.

        Raises:
            RefitError: lists all that is wrong.
        """
        prefix, known = f"checkpoint_engine.engine_kwargs.{BACKEND}", [f.name for f in fields(VerlOptions)]
        wrong = [
            f"{prefix}.{name} is not known; there are {', '.join(known)}"
            for name in given
            if name not in known
        ]
        options = VerlOptions(**{name: value for name, value in given.items() if name in known})
        if options.verify not in VERIFY_MODES:
            wrong.append(f"{prefix}.verify: {options.verify!r} is not one of {', '.join(VERIFY_MODES)}")
        if not isinstance(options.timeout_s, int | float) or not 0 < options.timeout_s <= LONGEST_TIMEOUT_S:
            wrong.append(
                f"{prefix}.timeout_s: {options.timeout_s!r} is not above 0 and at most {LONGEST_TIMEOUT_S:.0f} seconds"
            )
        if not isinstance(options.port, int) or not 0 <= options.port < 65536:
            wrong.append(f"{prefix}.port: {options.port!r} is no TCP port; give 0 for any free one")
        if bucket_size < 1:
            wrong.append(
                "checkpoint_engine.update_weights_bucket_megabytes leaves no room for a weight; give at least 1"
            )
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return options


@verl_base.CheckpointEngineRegistry.register(BACKEND)
class NcclXferCheckpointEngine(verl_base.CheckpointEngine):
    """The engine of one worker: an actor rank, or a rollout worker beside its inference process.

    Args:
        bucket_size: bytes of a bucket; two are held on actor rank 0 and on every rollout worker during an update.
        is_master: whether this is actor rank 0.
        options: fields of :class:`VerlOptions`.
    """

    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any):
        self.options = VerlOptions.from_kwargs(bucket_size, options)
        self.is_master = is_master
        self.version: int | None = None
        self._settings = FullTensorSettings(bucket_size, self.options.verify, float(self.options.timeout_s))
        self._epoch: FullTensorEpoch | None = None
        self._epoch_name = ""
        self._epochs = 0
        self._listener: socket.socket | None = None
        self._arrived: RefitRecord | None = None

    def prepare(self) -> dict[str, Any]:
        """Say whether the last update's epoch can go on, and on actor rank 0 listen for the next one.

        Returns:
            ``protocol`` of this adapter; ``held``: name of the epoch that this worker can go on with and its rank
            there, or None; ``address`` (host, port, number) of the next epoch, on actor rank 0 alone.
        """
        self._arrived = None
        if self._epoch is not None and not self._epoch.healthy():
            self._epoch = None
        held = None if self._epoch is None else (self._epoch_name, self._epoch.world.rank)
        address = None
        if self.is_master:
            self._close_listener()
            host = str(ray.util.get_node_ip_address()).strip("[]")  # type: ignore[no-untyped-call]
            self._listener = listen(host, self.options.port)
            self._epochs += 1
            address = (host, self._listener.getsockname()[1], self._epochs)
        return {"protocol": _PROTOCOL, "held": held, "address": address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Which epoch the workers join: the one that they all hold, or a new one.

        Raises:
            RefitMismatch: workers run another rlrefit, or actor rank 0 does not listen.
        """
        size = actor_wg_world_size + rollout_world_size
        strangers = [rank for rank, report in enumerate(metadata) if report.get("protocol") != _PROTOCOL]
        if strangers or len(metadata) != size or rollout_world_size < 1:
            raise RefitMismatch(
                f"{len(metadata)} workers reported, of {actor_wg_world_size} actors and {rollout_world_size} rollout "
                f"workers; those of another rlrefit than the driver's: {strangers or 'none'}. Nothing has moved; install "
                "the same rlrefit everywhere, and have at least one replica",
                stage="rendezvous",
            )
        if metadata[0]["address"] is None:
            raise RefitMismatch(
                "actor rank 0 was not made with is_master=True, so nobody listens for the others. Nothing has moved; make "
                "its engine as verl's ActorRolloutRefWorker does",
                stage="rendezvous",
                rank=0,
            )
        held = [report["held"] for report in metadata]
        name = "" if held[0] is None else str(held[0][0])
        # The name ends with the membership: if the last replica has gone, the others still stand in their places.
        members = f"/{actor_wg_world_size}+{rollout_world_size}"
        goes_on = held == [(name, rank) for rank in range(size)] and name.endswith(members)
        meeting: dict[str, Any] | None = None
        if not goes_on:
            host, port, epoch = metadata[0]["address"]
            token, name = secrets.token_hex(32), secrets.token_hex(8) + members
            meeting = Rendezvous(host, port, actor_wg_world_size, rollout_world_size, epoch, token).to_json()
        both: dict[str, list[Any]] = {
            "rank": list(range(size)),
            "meeting": [meeting] * size,
            "name": [name] * size,
        }
        actors = {key: values[:actor_wg_world_size] for key, values in both.items()}
        rollouts = {key: values[actor_wg_world_size:] for key, values in both.items()}
        return actors, rollouts

    def init_process_group(self, **kwargs: Any) -> None:
        """Go on with the epoch that is held, or join a new one at the same time as all other workers.

        Args:
            kwargs: ``rank``, ``meeting`` and ``name`` of this worker, from :meth:`build_topology`.

        Raises:
            RefitMismatch, RefitTimeout, PeerLost: nothing has moved then.
        """
        if kwargs["meeting"] is None:
            self._close_listener()
            return
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None
        rendezvous = Rendezvous.from_json(kwargs["meeting"])
        server = None
        if self._listener is not None:
            server, self._listener = RendezvousServer(self._listener, rendezvous), None
        self._epoch = FullTensorEpoch(rendezvous, kwargs["rank"], self._settings, server)
        self._epoch_name = kwargs["name"]
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
        record = await self._open_epoch.send(weights, global_steps)
        self._arrived = record
        return _metrics(record) if record.rank == 0 else {}

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
            folder = Path(self.options.records_dir)
            folder.mkdir(parents=True, exist_ok=True)
            world = self._open_epoch.world
            place = record.rank if world.is_source else record.rank - world.train_ranks
            with (folder / f"refits-{record.role}-{place}.jsonl").open("a") as file:
                file.write(json.dumps(record.to_json()) + "\n")

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

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def _metrics(record: RefitRecord) -> dict[str, float]:
    """Under the prefix of verl's own engines."""
    found = {
        "checkpoint_engine/payload_mbytes": record.bytes_misc / (1 << 20),
        "checkpoint_engine/seconds": record.seconds_total,
        "checkpoint_engine/epoch": float(record.epoch),
    }
    stages = {f"checkpoint_engine/{stage}_seconds": seconds for stage, seconds in record.seconds.items()}
    return found | stages
