"""``ray.trainer_env`` and ``ray.generation_env``: the processes of each role start with variables of their own."""

from __future__ import annotations

from rlrefit.recipes.cluster import ActorGroup, ray_cluster
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
