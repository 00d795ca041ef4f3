"""A manager for verl's trainers whose engines share their GPUs: of ``trainers``, and of those that take one by name.

actor_rollout_ref.rollout:
  checkpoint_manager_class: rlrefit.workers.frameworks.verl.manager.RefitCheckpointManager
  checkpoint_engine:
    backend: nccl_xfer_shards
    custom_backend_module: rlrefit.workers.frameworks.verl.engine
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutMode

from ....integration.colocated.stages import KV_CACHE, WEIGHTS
from ....integration.errors import RefitError, RefitTimeout
from .options import BACKEND, read_options
from .orders import Order

if TYPE_CHECKING:
    from .sglang_server import SglangServer


class RefitCheckpointManager(CheckpointEngineManager):
    """verl's manager, which for replicas on the trainer's own GPUs orders the engines' workers to refit shard to shard.

    The turns are verl's: the weights wake, the update runs, the trainer gives its memory back, the KV cache wakes. Other
    replicas are updated as verl does.

    Args:
        config: verl's ``CheckpointEngineConfig``.
        actor_wg: the actors.
        replicas: all of them on the actors' GPUs, or none.

    Raises:
        RefitError: another backend, wrong options, or replicas that can't be reached worker by worker; lists all reasons.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self._options, wrong = read_options(config)
        self._require_shards(replicas, wrong)
        self._limit_s = self._options.refit.call_limit_s
        # Those that were late or had ended in the last update.
        self._missing: list[str] = []
        self._version = 0
        # Name of the epoch that the engines' workers have joined, and the replicas that did.
        self._held: tuple[str, list[Any]] = "", []
        # Servers of SGLang by the rank of their replica, each with the thread that calls it.
        self._sglang: dict[int, tuple[SglangServer, ThreadPoolExecutor]] = {}

    def add_replicas(self, replicas: list[Any]) -> None:
        """As verl's; they take part from the next update on."""
        self._require_shards(replicas)
        super().add_replicas(replicas)

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Bring the actors' weights into all replicas; returns the metrics of actor rank 0.

        Args:
            global_steps: verl's step, the version. None for that of the update before: verl's validation wakes engines so that
                slept for a colocated reward model.

        Raises:
            RefitError: and its kinds, from the actors, or a RefitTimeout that names who does not answer. The trainer has
                given its memory back then, unless a note of the error says why not; the KV cache sleeps on, and the engines
                refuse to generate until an update succeeds.
        """
        if not any(_shares_gpus(replica) for replica in self.replicas):
            found: dict[str, float] = await super().update_weights(global_steps)
            return found
        if global_steps is not None:
            self._version = global_steps
        return self._update_in_turn(self._version)

    def _update_in_turn(self, version: int) -> dict[str, float]:
        self._missing.clear()
        sleeping = [replica for replica in self.replicas if replica.config.free_cache_engine]
        try:
            metrics = self._refit(version, sleeping)
        except Exception as error:
            self._release_after(error)
            raise
        self._each_actor("release")
        # As verl's own hand-over ends; what the caches hold was computed with the weights of before.
        self._each_server(self.replicas, "clear_kv_cache")
        self._each_server(self.replicas, "set_global_steps", global_steps=version)
        self._wake(sleeping, KV_CACHE)
        return metrics

    def _refit(self, version: int, sleeping: list[Any]) -> dict[str, float]:
        actors = self.actor_wg.world_size
        reports = self._each_actor("prepare")
        self._wake(sleeping, WEIGHTS)
        firsts, rollouts = [], 0
        for replica in self.replicas:
            firsts.append(actors + rollouts)
            rollouts += replica.world_size
        name, members = self._held
        goes_on = bool(name) and members == self.replicas
        reports += [
            {**reports[0], "held": (name, actors + i) if goes_on else None, "address": None}
            for i in range(rollouts)
        ]
        self._held = "", []
        ours, theirs = self.backend_cls.build_topology(actors, rollouts, reports)
        self._each_actor("init_process_group", **ours)
        orders = [
            Order(
                theirs["meeting"][0],
                first,
                actors,
                version,
                asdict(self._options.refit),
                self._options.records_dir,
            )
            for first in firsts
        ]
        sent = self.actor_wg.update_weights(global_steps=version, mode=self.backend)
        received = [
            self._refit_as_ordered(replica, order)
            for replica, order in zip(self.replicas, orders, strict=True)
        ]
        who = [*self._actors(), *map(_server_of, self.replicas)]
        metrics: dict[str, float] = self._answers("update_weights", sent + received, who)[0]
        self._each_actor("finalize")
        self._held = theirs["name"][0], list(self.replicas)
        return metrics

    def _refit_as_ordered(self, replica: Any, order: Order) -> Any:
        if _is_sglang(replica):
            return self._in_thread(replica, "refit", order)
        return replica.server_handle.collective_rpc.remote("refit_as_ordered", args=(asdict(order),))

    def _wake(self, replicas: list[Any], tag: str) -> None:
        refs, who = [], []
        for replica in replicas:
            # verl's server of SGLang refuses to wake on the trainer's GPUs: verl's actors do it as they hand over.
            refs += (
                [self._in_thread(replica, "wake", tag, self._options.refit)]
                if _is_sglang(replica)
                else [server.wake_up.remote(tags=[tag]) for server in replica.servers]
            )
            who += [_server_of(replica)] * (len(refs) - len(who))
        self._answers("wake_up", refs, who)

    def _in_thread(self, replica: Any, method: str, *args: Any) -> Future[None]:
        from .sglang_server import SglangServer  # imports SGLang, which is there where a replica of it is

        rank = replica.replica_rank
        if rank not in self._sglang:
            thread = ThreadPoolExecutor(1, thread_name_prefix="rlrefit")
            self._sglang[rank] = SglangServer(replica.server_handle, rank), thread
        server, thread = self._sglang[rank]
        return thread.submit(getattr(server, method), *args)

    def _release_after(self, error: Exception) -> None:
        if set(self._missing).intersection(self._actors()):
            error.add_note("the trainer's memory was not given back: not all actors are there and answer")
            return
        try:
            self._each_actor("release")
        # Of any kind, verl's or Ray's: the update's own is the one that says what happened first.
        except Exception as second:
            error.add_note(f"the trainer's memory was not given back: {type(second).__name__}: {second}")

    def _actors(self) -> list[str]:
        return [f"actor rank {rank}" for rank in range(self.actor_wg.world_size)]

    def _each_actor(self, method: str, **kwargs: list[Any]) -> list[Any]:
        size = self.actor_wg.world_size
        refs = self.actor_wg.execute_checkpoint_engine(method=[method] * size, **kwargs)
        return self._answers(method, refs, self._actors())

    def _each_server(self, replicas: list[Any], method: str, **kwargs: Any) -> list[Any]:
        servers = [(server, replica) for replica in replicas for server in replica.servers]
        refs = [getattr(server, method).remote(**kwargs) for server, _ in servers]
        return self._answers(method, refs, [_server_of(replica) for _, replica in servers])

    def _answers(self, what: str, refs: Sequence[Any], who: Sequence[str]) -> list[Any]:
        """All answers; everybody is waited for even after an error, so that nobody is at it when it is raised."""
        calls = [ref if isinstance(ref, Future) else ref.future() for ref in refs]
        late = wait(calls, timeout=self._limit_s).not_done
        found, errors = [], []
        for call, name in zip(calls, who, strict=True):
            if call in late:
                self._missing.append(name)
                continue
            try:
                found.append(call.result())
            except RayActorError as error:
                self._missing.append(name)
                errors.append(error)
            except Exception as error:
                errors.append(error)
        if late:
            timeout = RefitTimeout(
                f"{', '.join(name for call, name in zip(calls, who, strict=True) if call in late)} did not answer {what} within "
                f"{self._limit_s:.0f} s. The engines may hold weights in part and refuse to generate; see what those processes "
                "do (py-spy dump), and update again or start anew",
                stage="transfer",
            )
            for told in dict.fromkeys(str(error) for error in errors):
                timeout.add_note(f"Another one answered: {told}")
            raise timeout
        if errors:
            raise errors[0]
        return found

    def _require_shards(self, replicas: list[Any], more: Sequence[str] = ()) -> None:
        wrong = list(more)
        if self.backend != BACKEND:
            wrong.append(f"checkpoint_engine.backend is {self.backend}; set it to {BACKEND}")
        everyone = [*self.replicas, *replicas]
        if len({_shares_gpus(replica) for replica in everyone}) > 1:
            wrong.append(
                "some replicas are on the actors' GPUs and some are not; give each kind a manager of its own"
            )
        if any(_shares_gpus(r) and r.config.data_parallel_size > 1 for r in everyone):
            wrong.append(
                "rollout.data_parallel_size is above 1, and verl's servers reach one of the engine's data-parallel ranks; "
                "have more replicas instead"
            )
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")


def _shares_gpus(replica: Any) -> bool:
    return replica.rollout_mode == RolloutMode.HYBRID


def _is_sglang(replica: Any) -> bool:
    return bool(replica.config.name == "sglang")


def _server_of(replica: Any) -> str:
    return f"the server of replica {replica.replica_rank}"
