"""What a rollout engine returns for one prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: generated tokens, the one that ends a completion included if it was reached.
        logprobs: log-probability of each under the distribution it was sampled from (temperature
            applied); under temperature 1 for greedy decoding. Same length.
        finished: whether a token that ends a completion was reached; a model may have several.
        version: version of the weights that generated it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    version: int
