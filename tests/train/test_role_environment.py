"""``ray.trainer_env`` and ``ray.generation_env``: the processes of each role start with variables of their own.

And guests beside other actors with those that show them the others' GPUs.
"""

from __future__ import annotations

from rlrefit.recipes.cluster import ActorGroup, GuestGroup, ray_cluster
from rlrefit.recipes.config import load_config


def test_actors_start_with_the_environment_of_their_role(ray_address: str) -> None:
    config = load_config(
        "grpo_tiny",
        [
            f"ray.address={ray_address}",
            "ray.trainer_env.ROLE=trainer",
            "ray.generation_env.PYTHONPATH=/a:/b",
        ],
    ).ray

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
        assert [group.call("start") for group in groups] == [[("trainer", [])], [(None, ["/a", "/b"])]]
        for group in groups:
            group.shutdown()


def test_guests_see_the_gpus_of_their_hosts_in_order(ray_address: str) -> None:
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
        gpus = hosts.call("visible_gpus")
        assert guests.call("seen") == [[",".join(gpus[:2]), "engine"], [",".join(gpus[2:]), "engine"]]
        guests.shutdown()
        hosts.shutdown()
