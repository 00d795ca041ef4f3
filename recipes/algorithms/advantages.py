"""Group-relative advantages: a completion is judged against the other completions of its prompt."""

from __future__ import annotations

from torch import Tensor, isfinite, where
from torch import float64 as double


def group_advantages(
    rewards: Tensor, group_size: int, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Advantage of each completion: its reward minus its group's mean, over the group's standard deviation.

    Source: GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision):
    ``A_i = (r_i - mean(r)) / std(r)``. The deviation is the sample's (``n - 1``), as verl and TRL have
    it. ``normalize_std=False`` leaves the division out (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: shape ``[N]``, any real dtype; the group of prompt ``g`` is the contiguous slice
            ``[g * group_size, (g + 1) * group_size)``.
        group_size: completions per prompt, at least 2.
        eps: added to the standard deviation, in units of reward.

    Returns:
        Shape ``[N]``, the dtype of ``rewards`` (float32 for integer or Boolean rewards). A group of
        equal rewards gets exactly 0.

    Raises:
        ValueError: ``rewards`` isn't a vector of whole groups, the groups are too small to compare,
            or a reward isn't finite.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}: a completion can't be compared with itself, its advantage would "
            "always be 0; sample at least 2 completions for each prompt"
        )
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, which is not a vector of whole groups of "
            f"{group_size}; pass the completions of each prompt contiguously and drop no member of a group"
        )
    if not bool(isfinite(rewards).all()):
        first = int((~isfinite(rewards)).nonzero()[0])
        raise ValueError(
            f"reward {first} (member {first % group_size} of group {first // group_size}) is "
            f"{rewards[first].item()}; it would make the whole group's advantages NaN; correct the reward function"
        )
    dtype = rewards.dtype if rewards.is_floating_point() else None
    groups = rewards.to(double).view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if normalize_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    # The mean of equal numbers is not always that number in floating point; divided by eps, the
    # rounding would come out as a signal.
    equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    flat = where(equal, 0.0, advantages).flatten()
    return flat.to(dtype) if dtype is not None else flat.float()
