"""SGLang's two ranks with the experts of Kimi-K2.5 in INT4, refitted from Megatron's, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tests.families.kimi_trainer import RANKS, served

from .int4_ranks import CPU, Int4Case, held, kernels
from .models import begin, load_model


def serve(
    rank: int, meeting: str, case: Int4Case, exports: Sequence[str]
) -> tuple[list[list[str]], dict[str, int]]:
    """What differs after each refit into poison from what SGLang loads of the export, and how many weights took each route."""
    begin(rank, case.served[0], RANKS)
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    with kernels(case):
        live = load_model(case.served[0])
        return served(
            rank,
            meeting,
            SglangDestination(live, CPU),
            exports,
            lambda: held(live.model).values(),
            lambda: held(live.model),
            lambda folder: held(load_model(folder).model),
        )
