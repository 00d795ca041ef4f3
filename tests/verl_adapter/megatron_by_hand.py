"""verl's Megatron engine shard to shard on CPUs: two actors at TP2 and a vLLM server. Run by hand, in four minutes or more:

    pip install megatron-energon tensorboard deprecation  # of Bridge's training configuration, which verl's engine imports
    python -m tests.verl_adapter.megatron_by_hand FOLDER [actor_rollout_ref.actor.megatron.param_offload=true]

Three updates by verl's manager, then two by the manager for replicas on the actors' GPUs. All live parameters are NaN before
each, and compared after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from examples.verl.on_cpus import environment

ROLLOUT = "actor_rollout_ref.rollout"
# vLLM has no sleep mode on CPUs.
AWAKE = (f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false")


def main(folder: Path, overrides: tuple[str, ...]) -> None:
    """Raises AssertionError where a parameter, a version or an answer is not as it has to be."""
    env = prepare(folder)
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint
    from tests.verl_adapter.fleet import seconds_of_updates, shard_fleet
    from tests.verl_adapter.megatron_actor import MegatronActor

    checkpoint = make_checkpoint("qwen3", folder / "model")
    with shard_fleet(folder, checkpoint, env, 2, 1, (*AWAKE, *overrides), actor_class=MegatronActor) as fleet:
        seconds = seconds_of_updates(fleet, checkpoint, fleet.manager(0), (1, 2, 3))
        seconds += seconds_of_updates(fleet, checkpoint, in_turns(fleet), (6, 7))
        for role in ("trainer", "generation"):
            records = fleet.records(role)
            assert [record["version"] for record in records] == [1, 2, 3, 6, 7]
            assert all(record["bytes_bulk"] > 0 == record["bytes_misc"] for record in records)
    print(  # noqa: T201
        "as it has to be, five times; seconds:",
        *(f"{told['checkpoint_engine/seconds']:.3f}" for told in seconds),
    )


def prepare(folder: Path) -> dict[str, str]:
    """Have this process import what the fleet's processes do; their environment."""
    env = environment(folder) | {"CUDA_VISIBLE_DEVICES": "0,1,2"}  # numbers that Ray hands out
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    return env


def in_turns(fleet: Any) -> Any:
    """The manager for replicas on the actors' GPUs, as which the first one is taken from here on."""
    from verl.workers.rollout.replica import RolloutMode

    from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager

    fleet.replicas[0].rollout_mode = RolloutMode.HYBRID
    return RefitCheckpointManager(fleet.manager(0).config, fleet.actors, fleet.replicas[:1])


def folder_of(argument: str) -> Path:
    """A folder that is made if it is not there."""
    made = Path(argument).resolve()
    made.mkdir(parents=True, exist_ok=True)
    return made


if __name__ == "__main__":
    main(folder_of(sys.argv[1]), tuple(sys.argv[2:]))
