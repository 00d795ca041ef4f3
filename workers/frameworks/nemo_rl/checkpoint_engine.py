"""NeMo-RL's ``refit_transport`` over the full tensors that any of its policy workers exports.

    policy.generation:
      refit_transport: "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine"
      refit_cfg:
        "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine": {timeout_s: 300}

NeMo-RL imports the module in its policy workers and in vLLM's, where generation has GPUs of its own. Shard to shard is
:mod:`rlrefit.workers.frameworks.nemo_rl`.
"""

from __future__ import annotations

import importlib
from typing import Any

from .contract import CHECKPOINT_ENGINE, require_supported
from .full_tensors import FullTensorEngine

__all__ = ["NcclXferCheckpointEngine"]

require_supported([CHECKPOINT_ENGINE])

_base: Any = importlib.import_module(CHECKPOINT_ENGINE.module)


class NcclXferCheckpointEngine(FullTensorEngine, _base.CheckpointEngine):  # type: ignore[misc]  # NeMo-RL is not installed
    """As :class:`.full_tensors.FullTensorEngine`, of NeMo-RL's own kind."""
