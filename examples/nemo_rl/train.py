"""NeMo-RL's own ``examples/run_grpo.py`` with weights shard to shard: rlrefit around its ``setup``, then its training.

uv run --directory $NEMO_RL python …/examples/nemo_rl/train.py --config YOURS policy.generation.refit_transport=rlrefit
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import nemo_rl
except ModuleNotFoundError:
    raise SystemExit(
        "this Python has no package nemo_rl: run it in NeMo-RL's environment (docs/nemo_rl.md)"
    ) from None

sys.path.insert(0, str(Path(nemo_rl.__file__).parents[1] / "examples"))

import run_grpo as launcher  # NeMo-RL's

from rlrefit.workers.frameworks.nemo_rl.install import around

if __name__ == "__main__":
    launcher.setup = around(launcher.setup)
    launcher.main()
