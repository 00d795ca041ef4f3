"""The generators that an engine's worker draws its samples from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_process(seed: int) -> dict[str, Any]:
    """Begin the generators of this process anew, as vLLM and SGLang do when they start.

    Args:
        seed: below 4294967296, which is NumPy's limit.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of all devices
    return {}
