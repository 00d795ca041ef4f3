"""NeMo-RL's own ``examples/run_grpo.py`` with weights shard to shard: its ``setup``, then :func:`install`, then its training.

uv run --directory $NEMO_RL python …/examples/nemo_rl/train.py --config …/grpo_qwen3_4b.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nemo_rl

sys.path.insert(0, str(Path(nemo_rl.__file__).parents[1] / "examples"))

import run_grpo as launcher  # NeMo-RL's

from rlrefit.workers.frameworks.nemo_rl.install import install

nemo_rls_setup = launcher.setup


def setup(*args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's, whose first two results are the policy and its generation."""
    made = nemo_rls_setup(*args, **kwargs)
    policy, policy_generation, *_ = made
    install(policy, policy_generation)
    return made


if __name__ == "__main__":
    launcher.setup = setup
    launcher.main()
