"""The Ray cluster of a run: start or join it, groups of actors, and failures that name the rank."""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...integration.errors import PeerLost
from ...workers.checkpoint_folder import is_hub_name
from ...workers.ray_host import node_address
from ..config.schema import RayConfig

logger = logging.getLogger(__name__)

# Only tokens and log-probabilities go through Ray's object store; weights never do.
_OBJECT_STORE_BYTES = 256 << 20
# The ranks have environments of their own, so none would take a process that Ray starts ahead, one per core; and ray.init
# waits for those, for ever if one of them is too slow to register.
_NONE_AHEAD = {"prestart_worker_first_driver": False}
# Hosts of a cluster that was just started may still be on their way.
_JOINING_S = 30.0
# Seconds in which Ray tells of a death that another rank has noticed.
_CAUSE_S = 3.0


class RunError(RuntimeError):
    """A run that can't go on; the text says which rank or resource, why, and what to do."""


@contextmanager
def ray_cluster(config: RayConfig, ranks: int) -> Iterator[None]:
    """Join the configured cluster, or start one on this machine for the time of the block.

    Args:
        config: address and reservation per rank.
        ranks: trainer and generation ranks together; a local cluster offers that many slots, however
            few cores there are, because the ranks of a small run take turns.

    Raises:
        RunError: the cluster can't be reached.
    """
    try:
        if config.address is None:
            slots = max(os.cpu_count() or 1, int(ranks * config.cpus_per_rank + 0.999))
            with _out_of_the_drivers_process_group():
                ray.init(
                    "local",  # without it Ray would join a cluster of this machine, or that of RAY_ADDRESS
                    num_cpus=slots,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _system_config=_NONE_AHEAD,
                )
        else:
            _require_listener(config.address)
            ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
    # Of any kind: where its start times out, as on a host under heavy load, Ray raises no other than Exception.
    except Exception as error:
        where = f"at {config.address}" if config.address else "on this machine"
        token = (
            " If Ray was started where it found a token (~/.ray/auth_token), set RAY_AUTH_MODE=token for this command, and have the "
            "same token here."
            if type(error) is ConnectionError  # of its kinds each says by itself what is wrong
            and os.environ.get("RAY_AUTH_MODE") != "token"
            else ""
        )
        raise RunError(
            f"no Ray cluster {where}: {str(error).rstrip('.')}. Give ray.address of a running cluster, or null to start one here."
            f"{token}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _out_of_the_drivers_process_group() -> Iterator[None]:
    """Ray's servers that start meanwhile get groups of their own.

    SIGTERM often goes to the whole group of a command (``timeout``, supervisors, cancelled jobs), and is for the driver,
    which needs them until its step is saved. Ray keeps SIGINT from them, and has no setting for other signals. A Ray that starts
    them by another function leaves them in the driver's.
    """
    before = getattr(services, "ConsolePopen", None)
    if before is None:
        yield
        return
    services.ConsolePopen = partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before


def _require_listener(address: str) -> None:
    """An ``OSError`` where nothing listens at ``host:port``; Ray itself tries such an address for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # and not "auto"
        socket.create_connection((host.strip("[]"), int(port)), timeout=_JOINING_S).close()


class HostActor:
    """Base of the actors of a run, which may be on any host of the cluster."""

    def has(self, path: str) -> tuple[bool, str]:
        """Whether there is ``path`` on this actor's host, and the host's address."""
        return Path(path).exists(), node_address()


class ActorGroup:
    """Actors of one kind, rank by rank, in placement groups of their own.

    Args:
        name: what users call the ranks, e.g. ``trainer``.
        actor: the actor's class, undecorated; a :class:`HostActor`.
        count: number of actors.
        gpus: GPUs of each; 0 on a machine without.
        config: reservation per rank and time limits.
        cpus: CPU cores of each; None takes ``config.cpus_per_rank``.
        bundles: equal parts that each actor's reservation is cut into. With 1 an actor holds it itself, on one
            host. With more the parts may lie on several hosts, and it is actors which the actor starts that take
            them (vLLM's Ray executor: a rank each).
        env: environment variables of the actors' processes, set before they start.
        python: their interpreter; None takes this one.
        guest_cpus: CPU cores that are reserved beside each actor for another group's (:class:`GuestGroup`); all are on
            one host then.

    Raises:
        RunError: the actors found no place in time, or no host of the cluster is large enough for those of one.
    """

    def __init__(
        self,
        name: str,
        actor: type,
        count: int,
        gpus: int,
        config: RayConfig,
        cpus: float | None = None,
        bundles: int = 1,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        guest_cpus: float = 0.0,
    ) -> None:
        self.name = name
        self._timeout_s = config.timeout_s
        cpus = config.cpus_per_rank if cpus is None else cpus
        bundle = {"CPU": cpus / bundles + guest_cpus} | ({"GPU": gpus / bundles} if gpus else {})
        apart = bundles > 1
        self._strategy = "STRICT_PACK" if guest_cpus else "PACK"
        if guest_cpus:
            self._require_host(bundle, count)
        self._placements = [
            placement_group([bundle] * (bundles if apart else count), strategy=self._strategy)
            for _ in range(count if apart else 1)
        ]
        self._wait_for_places(bundle, count * bundles)
        # Ranks in a row share a host: tensor-parallel groups are cut from them.
        places = [0] * count if apart else bundles_by_host(_hosts_of(self._placements[0]))
        self._places = places
        remote = ray.remote(actor)
        self.actors = [
            remote.options(
                num_cpus=0 if apart else cpus,
                num_gpus=0 if apart else gpus,
                max_restarts=0,
                runtime_env=_runtime_env(env or {}, python),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placements[rank if apart else 0],
                    placement_group_bundle_index=places[rank],
                    placement_group_capture_child_tasks=apart,
                ),
            ).remote()
            for rank in range(count)
        ]

    def _require_host(self, bundle: dict[str, float], count: int) -> None:
        """Ray would wait for a host that never comes, all of the time limit long."""
        needed = {kind: amount * count for kind, amount in bundle.items()}
        deadline = time.monotonic() + min(self._timeout_s, _JOINING_S)
        while True:
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            # Less what adding fractions of cores is off by.
            if any(all(host.get(kind, 0.0) > n - 1e-6 for kind, n in needed.items()) for host in hosts):
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(0.5)
        offered = " or ".join(
            sorted({", ".join(f"{host.get(kind, 0.0):g} {kind}" for kind in needed) for host in hosts})
        )
        raise RunError(
            f"{count} {self.name} ranks that share their GPUs with engines have to be on one host, whose memory the weights "
            f"go through, and need {', '.join(f'{n:g} {kind}' for kind, n in needed.items())} there; hosts of this cluster "
            f"have {offered}. Nothing was started. Use fewer ranks (trainer.ranks, generation.replicas), fewer "
            "ray.cpus_per_rank if cores are what is short, a larger host, or generation.colocated.enabled=false."
        )

    def _wait_for_places(self, bundle: dict[str, float], count: int) -> None:
        try:
            ray.get([group.ready() for group in self._placements], timeout=self._timeout_s)
        except GetTimeoutError:
            offered = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            self._give_places_back()
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise RunError(
                f"{count} {self.name} ranks with {bundle} each found no place within {self._timeout_s:.0f} s"
                f"{' on one host' if self._strategy == 'STRICT_PACK' else ''}: the cluster offers {offered}, of which "
                f"{free} are free. Stop what holds the rest, add nodes, or ask for fewer ranks."
            ) from None

    def _give_places_back(self) -> None:
        for group in self._placements:
            remove_placement_group(group)

    def __len__(self) -> int:
        return len(self.actors)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[tuple[str, ray.ObjectRef]]:
        """Call a method on all actors without waiting; pass the result to :func:`gather`."""
        # Stored once: a batch would otherwise be copied into the object store for each rank.
        shared = [ray.put(argument) for argument in args]
        return [
            (f"{self.name} rank {rank}", getattr(actor, method).remote(*shared, **kwargs))
            for rank, actor in enumerate(self.actors)
        ]

    def submit_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> list[tuple[str, ray.ObjectRef]]:
        """Call a method with other arguments on each actor."""
        return [
            (f"{self.name} rank {rank}", getattr(actor, method).remote(*args))
            for rank, (actor, args) in enumerate(zip(self.actors, arguments, strict=True))
        ]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all actors and wait for all results, in the order of ranks."""
        return gather(self.submit(method, *args, **kwargs), self._timeout_s)

    def require_files(self, key: str, folder: Path) -> None:
        """Check that the hosts of all actors have a folder of the driver's host.

        Args:
            key: of the configuration, which names its place.
            folder: an absolute path.

        Raises:
            RunError: a host does not; names the first rank there.
        """
        for rank, (there, host) in enumerate(self.call("has", str(folder))):
            if not there:
                raise RunError(
                    f"{self.name} rank {rank} on {host} does not have {folder}, which is on the driver's host "
                    f"({node_address()}). Nothing was trained. Put {key} on a file system that all hosts mount at "
                    "the same path"
                )

    def require_model(self, model_path: str) -> None:
        """As :meth:`require_files`, for the folder of a checkpoint. One of the hub is fetched where it is missing."""
        if not is_hub_name(model_path):
            self.require_files("model.path", Path(model_path))

    def shutdown(self) -> None:
        """Stop the actors and give their places back."""
        for actor in self.actors:
            ray.kill(actor)
        self._give_places_back()


class GuestGroup(ActorGroup):
    """Actors that share the places and the GPUs of another group's actors.

    Ray assigns the GPUs to the other group alone. Each guest gets their numbers from here, since Ray would give a guest
    with more than one GPU several halves of the same one.

    Args:
        name: what users call the ranks.
        actor: the actor's class, undecorated.
        hosts: the other group, with ``guest_cpus``; its actors have to answer ``visible_gpus``.
        each: actors of the other group in a row whose places one guest takes.
        gpus: GPUs of each of these; 0 on a machine without.
        config: reservation per rank and time limits.
        env: environment variables of the guests' processes, set before they start.
        python: their interpreter; None takes this one.
    """

    def __init__(
        self,
        name: str,
        actor: type,
        hosts: ActorGroup,
        each: int,
        gpus: int,
        config: RayConfig,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self.name = name
        self._timeout_s = config.timeout_s
        # The hosts give them back.
        self._placements = []
        visible = hosts.call("visible_gpus") if gpus else []
        remote = ray.remote(actor)
        self.actors = [
            remote.options(
                num_cpus=config.cpus_per_rank,
                num_gpus=0,
                max_restarts=0,
                runtime_env=_runtime_env(dict(env or {}) | _seeing(visible[first : first + each]), python),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=hosts._placements[0],
                    placement_group_bundle_index=hosts._places[first],
                ),
            ).remote()
            for first in range(0, len(hosts), each)
        ]


def _runtime_env(env: Mapping[str, str], python: str | None) -> dict[str, Any] | None:
    # With nothing to set, Ray need not make processes for these actors alone.
    found = {"env_vars": dict(env)} if env else {}
    return found | ({"py_executable": shlex.quote(python)} if python else {}) or None


def _seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Environment of a process that sees these GPUs in this order; empty without GPUs."""
    if not gpus:
        return {}
    # Without the second variable Ray may empty the first for a process to which it assigned no GPUs.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def bundles_by_host(host_of: Mapping[int, str]) -> list[int]:
    """Numbers of the bundles, grouped by host; hosts in the order of their first bundles.

    Ray does not promise which host a bundle is on.
    """
    first: dict[str, int] = {}
    for bundle in sorted(host_of):
        first.setdefault(host_of[bundle], bundle)
    return sorted(host_of, key=lambda bundle: (first[host_of[bundle]], bundle))


def _hosts_of(group: PlacementGroup) -> dict[int, str]:
    return dict(placement_group_table(group)["bundles_to_node_id"])


def gather(
    calls: Sequence[tuple[str, ray.ObjectRef]],
    timeout_s: float,
    if_late: str = "raise ray.timeout_s if the work is only slow",
) -> list[Any]:
    """Wait for calls on several ranks; the first failure ends the wait, since the others may wait for that rank.

    What a rank has done to others may be told before its own end. So those that fail within a moment of the first failure are heard,
    and the one to blame is named: one that died, or else one that did not merely lose its peers.

    Raises:
        RunError: a rank raised, died, or did not answer within ``timeout_s`` seconds; names it.
    """
    names = {ref: name for name, ref in calls}
    results: dict[ray.ObjectRef, Any] = {}
    failures: list[RunError] = []
    pending = [ref for _, ref in calls]
    deadline = time.monotonic() + timeout_s
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done and not failures:
            late = ", ".join(names[ref] for ref in pending)
            raise RunError(f"{late} did not answer within {timeout_s:.0f} s; {if_late}")
        if not done:
            break
        for ref in done:
            try:
                results[ref] = _result(names[ref], ref)
            except RunError as error:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _CAUSE_S)
                failures.append(error)
    if failures:
        raise min(failures, key=_follows)
    return [results[ref] for _, ref in calls]


def _follows(failure: RunError) -> int:
    """0 for a rank's death, 1 for an error of its own, 2 for what follows from another rank's end."""
    told = failure.__cause__
    if isinstance(told, RayActorError):
        return 0
    return 2 if isinstance(told, RayTaskError) and isinstance(told.cause, PeerLost) else 1


def answers_within(calls: Sequence[tuple[str, ray.ObjectRef]], timeout_s: float) -> list[Any]:
    """What calls on several ranks have returned after ``timeout_s`` seconds at most; None of those that failed or are late.

    For questions after a failure, when a rank may wait for another one and answer nobody.
    """
    refs = [ref for _, ref in calls]
    done = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
    results: list[Any] = []
    for name, ref in calls:
        results.append(None)
        if ref not in done:
            logger.warning("%s did not answer within %.0f s after the failure", name, timeout_s)
            continue
        try:
            results[-1] = _result(name, ref)
        except RunError as error:
            logger.warning("no answer after the failure: %s", error)
    return results


def _result(name: str, ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        raise RunError(f"{name} failed: {type(cause).__name__}: {cause}{_log_of(error)}") from error
    except RayActorError as error:
        told = str(error).strip().splitlines()[-1]
        remedy = (
            "For a run that saves first, send that to rlrefit train alone"
            if "SIGTERM" in told
            else "Look for an out-of-memory kill in the system log"
        )
        raise RunError(
            f"{name} died: {told} {remedy}; resume=true goes on from the last checkpoint."
        ) from error
    except RayError as error:
        raise RunError(f"{name}: Ray reports {type(error).__name__}: {error}") from error


def _log_of(error: RayTaskError) -> str:
    """Where the process that raised wrote what led to it; vLLM, for one, tells its reasons there alone."""
    process = re.search(r"\(pid=(\d+), ip=([^,)]+)", str(error))
    if process is None:
        return ""
    return f" (its log: /tmp/ray/session_latest/logs/worker-*-{process[1]}.err on {process[2]})"


def free_port() -> int:
    """A TCP port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gpus_per_rank() -> int:
    """1 where the cluster has GPUs, else 0."""
    return 1 if ray.cluster_resources().get("GPU", 0) else 0
