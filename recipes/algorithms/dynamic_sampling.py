"""DAPO's dynamic sampling: refill a batch until every group in it carries a gradient.

Source: DAPO, arXiv 2503.14476, section 3.2. A group whose completions all got the same reward has
zero advantage throughout; it costs a place in the batch and teaches nothing. Such groups are set
aside and more prompts are sampled, for a bounded number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicSamplingStats:
    """What filling one batch took.

    Attributes:
        rounds: rounds of generation.
        sampled: groups that were offered.
        uniform: groups offered whose rewards were all equal.
        surplus: groups with a signal that found the batch full.
        filled: uniform groups in the batch, because the rounds ran out.
        missing: places left empty, because too few groups of any kind were offered.
    """

    rounds: int
    sampled: int
    uniform: int
    surplus: int
    filled: int
    missing: int


class DynamicSampler[Group]:
    """Collects groups, round by round, for one batch.

    Deterministic: which groups make the batch depends on the order in which they are offered alone.

    Args:
        target: groups that the batch wants.
        max_rounds: rounds of generation after which it takes what there is.

    Raises:
        ValueError: ``target`` or ``max_rounds`` is below 1.
    """

    def __init__(self, target: int, max_rounds: int) -> None:
        if target < 1 or max_rounds < 1:
            raise ValueError(
                f"dynamic sampling of {target} groups in at most {max_rounds} rounds can't fill a batch; both "
                "numbers must be at least 1"
            )
        self._target = target
        self._max_rounds = max_rounds
        self._rounds = 0
        self._kept: list[Group] = []
        self._uniform: list[Group] = []

    @property
    def missing(self) -> int:
        """Groups with a signal that are still wanted."""
        return max(0, self._target - len(self._kept))

    @property
    def done(self) -> bool:
        """Whether to stop sampling: the batch is full of groups with a signal, or the rounds ran out."""
        return not self.missing or self._rounds >= self._max_rounds

    def offer(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> None:
        """Takes one round's groups and the rewards of each group's completions.

        Raises:
            ValueError: rewards and groups differ in number, or a group has no rewards.
            RuntimeError: sampling was :attr:`done`; a round was generated for nothing.
        """
        if self.done:
            raise RuntimeError(
                f"dynamic sampling was done after {self._rounds} of {self._max_rounds} rounds with "
                f"{len(self._kept)} of {self._target} groups; check `done` before generating another round"
            )
        if len(groups) != len(rewards):
            raise ValueError(
                f"{len(groups)} groups came with rewards of {len(rewards)}; pass one list for each"
            )
        if empty := [index for index, group_rewards in enumerate(rewards) if not len(group_rewards)]:
            raise ValueError(
                f"group {empty[0]} of the round has no rewards; every group needs its completions'"
            )
        self._rounds += 1
        for group, group_rewards in zip(groups, rewards, strict=True):
            uniform = min(group_rewards) == max(group_rewards)
            (self._uniform if uniform else self._kept).append(group)

    def batch(self) -> tuple[list[Group], DynamicSamplingStats]:
        """The batch and what it took: groups with a signal first, in the order offered, then fillers.

        Raises:
            RuntimeError: sampling isn't :attr:`done` yet.
        """
        if not self.done:
            raise RuntimeError(
                f"the batch still wants {self.missing} of {self._target} groups and {self._rounds} of "
                f"{self._max_rounds} rounds are over; offer further rounds until `done`"
            )
        chosen = self._kept[: self._target]
        fillers = self._uniform[: self._target - len(chosen)]
        stats = DynamicSamplingStats(
            rounds=self._rounds,
            sampled=len(self._kept) + len(self._uniform),
            uniform=len(self._uniform),
            surplus=len(self._kept) - len(chosen),
            filled=len(fillers),
            missing=self._target - len(chosen) - len(fillers),
        )
        return chosen + fillers, stats
