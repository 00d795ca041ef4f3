"""Learning rates over the steps of a run."""

from __future__ import annotations

import math

LR_DECAYS = ("constant", "linear", "cosine")


def learning_rate(
    step: int, lr: float, *, warmup_steps: int, decay: str, decay_steps: int, min_lr: float
) -> float:
    """The rate of a step, as Megatron-core's ``OptimizerParamScheduler`` has it.

    Args:
        step: steps taken before.
        lr: the highest rate.
        warmup_steps: over which the rate rises linearly; the first step is not taken at 0, which would be for nothing.
        decay: one of :data:`LR_DECAYS`.
        decay_steps: until the rate is ``min_lr``, the warm-up included; not read where it is constant.
        min_lr: where a decaying rate ends.
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if decay == "constant":
        return lr
    part = min(1.0, (step - warmup_steps) / (decay_steps - warmup_steps))
    left = 1.0 - part if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return min_lr + left * (lr - min_lr)
