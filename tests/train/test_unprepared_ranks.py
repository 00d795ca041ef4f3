"""Ranks in a Python of their own: those of the other modules' runs are forked from processes that have loaded much."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from rlrefit.recipes.algorithms.losses import PolicyLossConfig
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.policy.make import policy_config
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.ahead import FoundAhead, keeping_time
from tests.spawn import free_port

RANKS = """
import pickle, sys
from pathlib import Path
from rlrefit.recipes.rollout.transformers import TransformersActor
from rlrefit.recipes.policy.group import TrainerActor

policy, refit, path, port = pickle.loads(Path(sys.argv[1]).read_bytes())
trainer, engine = TrainerActor(), TransformersActor()
trainer.join(0, 1, "127.0.0.1", port, 60.0, True)
trainer.build(policy, refit, False)
engine.build(path, "float32", 1, False, (0,), 0, False)
print("built")
"""


@keeping_time  # its ranks wait a minute for one another
def build_unprepared(folder: Path) -> subprocess.CompletedProcess[str]:
    config = load_config("grpo_tiny", ["trainer.ranks=1", "trainer.tensor_parallel=1", "model.dtype=float32"])
    path = str(make_checkpoint("qwen3", folder / "model"))
    arguments = (policy_config(config, path, PolicyLossConfig()), config.policy.refit, path, free_port())
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    command = [sys.executable, "-c", RANKS, str(folder / "arguments")]
    # The server of the tests' processes hides GPUs.
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)


AHEAD = (build_unprepared,)


def test_ranks_for_which_nothing_was_loaded_build_their_policy_and_engine(found_ahead: FoundAhead) -> None:
    done = found_ahead.by(build_unprepared)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("built\n")
