"""Reward shaping that depends on a completion's length."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the rewards.

    Source: DAPO, arXiv 2503.14476, eq. 13: 0 up to ``max_length - buffer`` tokens, then falling
    linearly, ``((max_length - buffer) - length) / buffer``, to -1 at ``max_length``, and -1 beyond.

    Args:
        lengths: shape ``[N]``, integers: tokens of each completion.
        max_length: tokens at which the punishment is whole.
        buffer: tokens over which it grows; 1 to ``max_length``.

    Returns:
        Shape ``[N]``, float32, in [-1, 0].

    Raises:
        ValueError: ``buffer`` isn't between 1 and ``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"the overlong buffer is {buffer} tokens and max_length {max_length}; the punishment grows over "
            "the last `buffer` tokens before max_length, so give 1 <= buffer <= max_length"
        )
    free = max_length - buffer
    return torch.clamp((free - lengths.to(torch.float32)) / buffer, min=-1.0, max=0.0)
