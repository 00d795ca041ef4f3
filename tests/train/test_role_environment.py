"""``ray.trainer_env``, ``ray.generation_env`` and ``ray.generation_python``: what the processes of each role start with.

And guests beside other actors with those that show them the others' GPUs.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.run.cluster import ActorGroup, GuestGroup, HostActor, RunError, ray_cluster
from tests.ahead import FoundAhead, keeping_time
from tests.ray_cluster import patient_ray

from .shared_cluster import on_shared_cluster


def _environment_of_its_own(folder: Path) -> Path:
    """The interpreter of one, which finds this one's packages."""
    venv.create(folder, symlinks=True)
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    link = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (folder / packages / "packages.pth").write_text(link)
    return folder / "bin" / "python"


Found = tuple[str | None, list[str], str]
Guests = tuple[list[str], list[list[str | None]], str]


def _start(folder: Path, ray_address: str) -> tuple[list[list[Found]], Guests]:
    config = load_config("grpo_tiny", [f"ray.address={ray_address}"]).ray
    with patient_ray(), ray_cluster(config, 4):
        return _roles(folder, ray_address), _guests(folder, ray_address)


def _roles(folder: Path, ray_address: str) -> list[list[Found]]:
    """What actors of each role find in their environment, and the prefix of their interpreter."""
    python = _environment_of_its_own(folder / "an engine's")
    roles = [
        "ray.trainer_env.ROLE=trainer",
        "ray.generation_env.PYTHONPATH=/a:/b",
        f'ray.generation_python="{python}"',
    ]
    config = load_config("grpo_tiny", [f"ray.address={ray_address}", *roles]).ray

    class Process:
        def start(self) -> Found:
            import os
            import sys

            return os.environ.get("ROLE"), [path for path in sys.path if path in ("/a", "/b")], sys.prefix

    groups = [
        ActorGroup(name, Process, 1, 0, config, env=env, python=python)
        for name, env, python in (
            ("trainer", config.trainer_env, None),
            ("generation", config.generation_env, config.generation_python),
        )
    ]
    found = [group.call("start") for group in groups]
    for group in groups:
        group.shutdown()
    return found


def _guests(folder: Path, ray_address: str) -> Guests:
    """The GPUs of four hosts, what two guests of two hosts each find in their environment, and what a missing folder ends with."""
    config = load_config("grpo_tiny", [f"ray.address={ray_address}", "ray.cpus_per_rank=0.5"]).ray

    class Host(HostActor):
        def visible_gpus(self) -> str:
            import ray

            # As if each had been given a GPU.
            return ray.get_runtime_context().get_actor_id()

    class Guest:
        def seen(self) -> list[str | None]:
            import os

            return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROLE")]

    hosts = ActorGroup("trainer", Host, 4, 0, config, guest_cpus=0.5)
    guests = GuestGroup("engine", Guest, hosts, 2, 1, config, env={"ROLE": "engine"})
    hosts.require_files("run_root", folder)
    with pytest.raises(RunError) as refused:
        hosts.require_files("run_root", folder / "of another host")
    found = hosts.call("visible_gpus"), guests.call("seen"), str(refused.value)
    guests.shutdown()
    hosts.shutdown()
    return found


@keeping_time  # Ray gives up starting after half a minute
def start_roles_and_guests(folder: Path) -> tuple[list[list[Found]], Guests]:
    return on_shared_cluster(_start, folder)


AHEAD = (start_roles_and_guests,)


def test_actors_start_with_the_variables_and_the_interpreter_of_their_role(found_ahead: FoundAhead) -> None:
    ((trainer,), (engine,)), _ = found_ahead.by(start_roles_and_guests)
    assert trainer == ("trainer", [], sys.prefix)
    assert engine[:2] == (None, ["/a", "/b"])
    assert engine[2].endswith("an engine's")


def test_guests_see_the_gpus_of_their_hosts_in_order(found_ahead: FoundAhead) -> None:
    _, (gpus, seen, _) = found_ahead.by(start_roles_and_guests)
    assert seen == [[",".join(gpus[:2]), "engine"], [",".join(gpus[2:]), "engine"]]


def test_a_folder_that_a_rank_does_not_see_is_refused_by_the_rank_and_its_key(
    found_ahead: FoundAhead,
) -> None:
    _, (*_, refused) = found_ahead.by(start_roles_and_guests)
    assert all(word in refused for word in ("trainer rank 0", "of another host", "run_root"))
