"""What the checkpoint engines for verl share: whether the last update's epoch goes on, and where the next one meets.

verl asks for a process group before every update; the one of the last update serves again as long as the same workers
take part and none has failed, and else an epoch of its own begins.
"""

from __future__ import annotations

import inspect
import secrets
import socket
from abc import abstractmethod
from typing import Any, ClassVar

import ray
from verl.checkpoint_engine import base as verl_base

from ....integration.control import Rendezvous, RendezvousServer, listen
from ....integration.errors import RefitMismatch
from ....integration.records.record import RefitRecord
from ...ray_host import node_address


class EpochEngine(verl_base.CheckpointEngine):
    """The engine of one worker: an actor rank, or a rollout worker beside its inference process.

    Args:
        is_master: whether this is actor rank 0.
        port: TCP port of the rendezvous on actor rank 0; 0 takes any free one. With one that is fixed each update has an
            epoch of its own.

    Attributes:
        protocol: of what workers and driver tell each other; another one for each contract, and whenever one changes.
    """

    wire_format = "named_tensors"
    protocol: ClassVar[object]

    def __init__(self, is_master: bool, port: int):
        self.is_master = is_master
        self._port = port
        self._name = ""
        self._rank = -1
        self._epochs = 0
        self._listener: socket.socket | None = None

    @abstractmethod
    def _holds(self) -> bool:
        """Whether this worker can go on with the epoch that it joined last."""

    @abstractmethod
    def _leave(self) -> None:
        """End the last epoch here, if there was one, and with it the rendezvous that this worker serves."""

    @abstractmethod
    def _join(self, rendezvous: Rendezvous, server: RendezvousServer | None) -> None:
        """Join this epoch, at the same time as all other workers; the last one has been left."""

    @abstractmethod
    def introduce(self, worker: Any) -> None:
        """Learn of the actor that this engine belongs to (:func:`meet_own_actor`).

        Raises:
            RefitError: it can't send its weights in this way; lists all reasons.
        """

    def introduce_rollout(self, worker: Any) -> None:
        """Learn of the rollout worker that this engine belongs to."""

    def prepare(self) -> dict[str, Any]:
        """Say whether the last update's epoch can go on, and on actor rank 0 listen for the next one.

        Returns:
            ``protocol`` of this engine; ``held``: name of the epoch that this worker can go on with and its rank
            there, or None; ``address`` (host, port, number) of the next epoch, on actor rank 0 alone.
        """
        held = (self._name, self._rank) if self._holds() else None
        if self.is_master and self._port:
            # The last epoch's rendezvous has the port until it ends, and whether it may stay is known to the driver alone.
            self._leave()
            held = None
        address = None
        if self.is_master:
            self._close_listener()
            host = node_address()
            self._listener = listen(host, self._port)
            self._epochs += 1
            address = (host, self._listener.getsockname()[1], self._epochs)
        return {"protocol": self.protocol, "held": held, "address": address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Which epoch the workers join: the one that they all hold, or a new one.

        Raises:
            RefitMismatch: workers run another rlrefit, or actor rank 0 does not listen.
        """
        size = actor_wg_world_size + rollout_world_size
        strangers = [rank for rank, report in enumerate(metadata) if report.get("protocol") != cls.protocol]
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
        rendezvous = Rendezvous.from_json(kwargs["meeting"])
        server = None
        if self._listener is not None:
            server, self._listener = RendezvousServer(self._listener, rendezvous), None
        self._leave()
        self._name, self._rank = kwargs["name"], kwargs["rank"]
        self._join(rendezvous, server)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def metrics_of(record: RefitRecord) -> dict[str, float]:
    """What verl merges into the trainer's metrics, under the prefix of verl's own engines."""
    found = {
        "checkpoint_engine/payload_mbytes": (record.bytes_bulk + record.bytes_misc) / (1 << 20),
        "checkpoint_engine/seconds": record.seconds_total,
        "checkpoint_engine/epoch": float(record.epoch),
    }
    if record.changed_share is not None:
        found["checkpoint_engine/changed_share"] = record.changed_share
        found["checkpoint_engine/wire_mbytes"] = record.bytes_wire / (1 << 20)
    stages = {f"checkpoint_engine/{stage}_seconds": seconds for stage, seconds in record.seconds.items()}
    return found | stages


async def meet_own_actor() -> None:
    """Introduce the engines of this process's workers to them."""
    # To itself, and so beside this coroutine, in the one thread of the actor's event loop.
    await ray.get_runtime_context().current_actor.__ray_call__.remote(_introduce)


def _introduce(actor: Any) -> None:
    """Called by Ray with its own actor: verl's worker, or what verl fuses several workers in."""
    fused = {**getattr(actor, "worker_dict", {}), **getattr(actor, "fused_worker_dict", {})}
    for worker in (actor, *fused.values()):
        engine = getattr(worker, "checkpoint_engine", None)
        if not isinstance(engine, EpochEngine):
            continue
        if isinstance(worker, verl_base.CheckpointEngineWorker):
            engine.introduce_rollout(worker)
        elif getattr(worker, "actor", None) is not None:
            engine.introduce(worker)


async def discard(weights: Any) -> None:
    """End an export of which nothing more is drawn."""
    if inspect.isgenerator(weights):
        weights.close()
    elif inspect.isasyncgen(weights):
        await weights.aclose()
