"""``ray.trainer_env`` and ``ray.generation_env``: the processes of each role start with variables of their own.

And guests beside other actors with those that show them the others' GPUs.
"""

from __future__ import annotations

from pathlib import Path

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.run.cluster import ActorGroup, GuestGroup, ray_cluster
from tests.ahead import FoundAhead, keeping_time

from .shared_cluster import on_shared_cluster


def _roles(folder: Path, ray_address: str) -> list[list[tuple[str | None, list[str]]]]:
    """What actors of each role find in their environment."""
    roles = ["ray.trainer_env.ROLE=trainer", "ray.generation_env.PYTHONPATH=/a:/b"]
    config = load_config("grpo_tiny", [f"ray.address={ray_address}", *roles]).ray

    class Process:
        def start(self) -> tuple[str | None, list[str]]:
            import os
            import sys

            return os.environ.get("ROLE"), [path for path in sys.path if path in ("/a", "/b")]

    with ray_cluster(config, 2):
        groups = [
            ActorGroup(name, Process, 1, 0, config, env=env)
            for name, env in (("trainer", config.trainer_env), ("generation", config.generation_env))
        ]
        found = [group.call("start") for group in groups]
        for group in groups:
            group.shutdown()
    return found


def _guests(folder: Path, ray_address: str) -> tuple[list[str], list[list[str | None]]]:
    """The GPUs of four hosts, and what two guests of two hosts each find in their environment."""
    config = load_config("grpo_tiny", [f"ray.address={ray_address}", "ray.cpus_per_rank=0.5"]).ray

    class Host:
        def visible_gpus(self) -> str:
            import ray

            # As if each had been given a GPU.
            return ray.get_runtime_context().get_actor_id()

    class Guest:
        def seen(self) -> list[str | None]:
            import os

            return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROLE")]

    with ray_cluster(config, 4):
        hosts = ActorGroup("trainer", Host, 4, 0, config, guest_cpus=0.5)
        guests = GuestGroup("engine", Guest, hosts, 2, 1, config, env={"ROLE": "engine"})
        found = hosts.call("visible_gpus"), guests.call("seen")
        guests.shutdown()
        hosts.shutdown()
    return found


@keeping_time  # Ray gives up starting after half a minute
def start_roles(folder: Path) -> list[list[tuple[str | None, list[str]]]]:
    return on_shared_cluster(_roles, folder)


@keeping_time
def start_guests(folder: Path) -> tuple[list[str], list[list[str | None]]]:
    return on_shared_cluster(_guests, folder)


AHEAD = (start_roles, start_guests)


def test_actors_start_with_the_environment_of_their_role(found_ahead: FoundAhead) -> None:
    assert found_ahead.by(start_roles) == [[("trainer", [])], [(None, ["/a", "/b"])]]


def test_guests_see_the_gpus_of_their_hosts_in_order(found_ahead: FoundAhead) -> None:
    gpus, seen = found_ahead.by(start_guests)
    assert seen == [[",".join(gpus[:2]), "engine"], [",".join(gpus[2:]), "engine"]]
