"""A manager that updates replicas by one call to each server and each actor: of ``trainers``, and of those that take one by name.

actor_rollout_ref.rollout:
  checkpoint_manager_class: rlrefit.workers.frameworks.verl.manager.RefitCheckpointManager
  checkpoint_engine:
    backend: nccl_xfer_shards
    custom_backend_module: rlrefit.workers.frameworks.verl.engine
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
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

# Of the metrics that tell each stage's seconds; verl's own metric of the whole is the same without the underscore.
SECONDS = "timing_s/update_weights_"


@dataclass(frozen=True)
class _Call:
    """A call under way: of which stage of the update, to whom, and what will be answered."""

    stage: str
    who: str
    answer: Future[Any]


class RefitCheckpointManager(CheckpointEngineManager):
    """verl's manager, which has the engines' workers refit shard to shard by one call to each server and each actor.

    On the trainer's own GPUs the turns are verl's: the weights wake, the update runs, the trainer gives its memory back, the KV
    cache wakes. Replicas on GPUs of their own hold their requests meanwhile, and keep weights and KV cache mapped. Of these, verl
    updates those itself that one server can't reach: of SGLang, data-parallel, disaggregated.

    Args:
        config: verl's ``CheckpointEngineConfig``.
        actor_wg: the actors.
        replicas: all of them on the actors' GPUs, or none.

    Attributes:
        metrics: of the last update, which not all of verl's trainers take from :meth:`update_weights`.

    Raises:
        RefitError: another backend, wrong options, or replicas that can't be reached worker by worker; lists all reasons.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self._options, wrong = read_options(config)
        self._require_shards(replicas, wrong)
        self._limit_s = self._options.refit.call_limit_s
        self.metrics: dict[str, float] = {}
        # Those that were late or had ended in the last update.
        self._missing: list[str] = []
        # Of the last update, by stage: until the last one of it had answered.
        self._seconds: dict[str, float] = {}
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
        """Bring the actors' weights into all replicas.

        Args:
            global_steps: verl's step, the version. None for that of the update before: verl's validation wakes engines so that
                slept for a colocated reward model.

        Returns:
            The metrics of actor rank 0, and ``timing_s/update_weights_STAGE``: the seconds of each stage.

        Raises:
            RefitError: and its kinds, from the actors, or a RefitTimeout that names who does not answer. The trainer has
                given its memory back then, unless a note of the error says why not; the KV cache sleeps on, or requests are
                held, and the engines refuse to generate until an update succeeds.
        """
        if global_steps is not None:
            self._version = global_steps
        if not all(_shares_gpus(replica) or _one_server_reaches(replica) for replica in self.replicas):
            self._held = "", []  # the engines' workers meet the actors in another epoch there
            self.metrics = await super().update_weights(self._version)
            return self.metrics
        self.metrics = self._update(self._version)
        return self.metrics

    def _update(self, version: int) -> dict[str, float]:
        self._missing.clear()
        self._seconds = {}
        shared = any(_shares_gpus(replica) for replica in self.replicas)
        sleeping = [replica for replica in self.replicas if shared and replica.config.free_cache_engine]
        try:
            metrics = self._refit(version, shared, sleeping)
        except Exception as error:
            self._release_after(error)
            raise
        # As verl's own hand-over ends; what the caches hold was computed with the weights of before.
        told = [
            *self._to_servers("drop_caches", "clear_kv_cache"),
            *self._to_servers("drop_caches", "set_global_steps", global_steps=version),
        ]
        if any(map(_is_sglang, sleeping)):
            self._answers(told)  # SGLang flushes a cache that sleeps, and none that wakes at that time
            told = []
        self._answers([*told, *self._waking(sleeping, KV_CACHE)])
        if not shared:
            self._answers(self._to_servers("resume", "resume_generation"))
        return metrics | {f"{SECONDS}{stage}": seconds for stage, seconds in self._seconds.items()}

    def _refit(self, version: int, shared: bool, sleeping: list[Any]) -> dict[str, float]:
        actors = self.actor_wg.world_size
        begun = self._to_actors("prepare", "begin", shares_gpu=[shared] * actors)
        held_back = [] if shared else self._to_servers("abort", "abort_all_requests")
        reports = self._answers([*begun, *held_back])[:actors]
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
        meeting = theirs["meeting"][0]
        self._answers(
            [
                *self._waking(sleeping, WEIGHTS),
                *([] if meeting is None else self._to_actors("meet", "init_process_group", **ours)),
            ]
        )
        if meeting is None and all(report["ready"] for report in reports[:actors]):
            calls = self._to_actors("refit", "refit", version=[version] * actors)
        else:
            sent = self.actor_wg.update_weights(global_steps=version, mode=self.backend)
            calls = [_Call("refit", who, _future(ref)) for who, ref in zip(self._actors(), sent, strict=True)]
        for replica, first in zip(self.replicas, firsts, strict=True):
            order = Order(
                meeting,
                first,
                actors,
                version,
                asdict(self._options.refit),
                self._options.records_dir,
                # verl passes over the sleep of a replica on GPUs of its own, and only its own manager releases a KV cache there.
                stays_awake=not _shares_gpus(replica),
            )
            calls.append(_Call("refit", _server_of(replica), self._refit_as_ordered(replica, order)))
        metrics: dict[str, float] = self._answers(calls)[0]
        self._held = theirs["name"][0], list(self.replicas)
        return metrics

    def _refit_as_ordered(self, replica: Any, order: Order) -> Future[Any]:
        if _is_sglang(replica):
            return self._in_thread(replica, "refit", order)
        return _future(replica.server_handle.collective_rpc.remote("refit_as_ordered", args=(asdict(order),)))

    def _waking(self, replicas: list[Any], tag: str) -> list[_Call]:
        calls: list[_Call] = []
        for replica in replicas:
            # verl's server of SGLang refuses to wake on the trainer's GPUs: verl's actors do it as they hand over.
            answers = (
                [self._in_thread(replica, "wake", tag, self._options.refit)]
                if _is_sglang(replica)
                else [_future(server.wake_up.remote(tags=[tag])) for server in replica.servers]
            )
            calls += [_Call(f"wake_{tag}", _server_of(replica), answer) for answer in answers]
        return calls

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
            self._answers(self._to_actors("release", "release"))
        # Of any kind, verl's or Ray's: the update's own is the one that says what happened first.
        except Exception as second:
            error.add_note(f"the trainer's memory was not given back: {type(second).__name__}: {second}")

    def _actors(self) -> list[str]:
        return [f"actor rank {rank}" for rank in range(self.actor_wg.world_size)]

    def _to_actors(self, stage: str, method: str, **kwargs: list[Any]) -> list[_Call]:
        refs = self.actor_wg.execute_checkpoint_engine(method=[method] * self.actor_wg.world_size, **kwargs)
        return [_Call(stage, who, _future(ref)) for who, ref in zip(self._actors(), refs, strict=True)]

    def _to_servers(self, stage: str, method: str, **kwargs: Any) -> list[_Call]:
        return [
            _Call(stage, _server_of(replica), _future(getattr(server, method).remote(**kwargs)))
            for replica in self.replicas
            for server in replica.servers
        ]

    def _answers(self, calls: Sequence[_Call]) -> list[Any]:
        """All answers; everybody is waited for even after an error, so that nobody is at it when it is raised."""
        self._await(calls)
        found, errors, late = [], [], []
        for call in calls:
            if not call.answer.done():
                late.append(call)
                continue
            try:
                found.append(call.answer.result())
            except RayActorError as error:
                self._missing.append(call.who)
                errors.append(error)
            except Exception as error:
                errors.append(error)
        if late:
            self._missing += [call.who for call in late]
            timeout = RefitTimeout(
                f"{_listed(call.who for call in late)} did not answer {_listed(call.stage for call in late)} within "
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

    def _await(self, calls: Sequence[_Call]) -> None:
        start = time.perf_counter()
        stages = {call.answer: call.stage for call in calls}
        try:
            for answer in as_completed(stages, timeout=self._limit_s):
                self._seconds[stages[answer]] = time.perf_counter() - start
        except TimeoutError:
            return  # who is late is seen by the answers

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


def _future(ref: Any) -> Future[Any]:
    found: Future[Any] = ref if isinstance(ref, Future) else ref.future()
    return found


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _shares_gpus(replica: Any) -> bool:
    return bool(replica.rollout_mode == RolloutMode.HYBRID)


def _one_server_reaches(replica: Any) -> bool:
    """Whether a call to the first server of a replica on GPUs of its own reaches all its workers, and finds vLLM's."""
    config = replica.config
    return bool(
        replica.rollout_mode == RolloutMode.STANDALONE
        and config.name == "vllm"
        and config.data_parallel_size == 1
        and not config.disaggregation.enabled
    )


def _is_sglang(replica: Any) -> bool:
    return bool(replica.config.name == "sglang")


def _server_of(replica: Any) -> str:
    return f"the server of replica {replica.replica_rank}"
