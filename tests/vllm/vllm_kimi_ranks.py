"""vLLM's two ranks with the experts of Kimi-K2.5 in INT4, refitted from Megatron's, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tests.families.kimi_trainer import RANKS, met
from tests.fp8_refits import bytes_of, differing, poison

if TYPE_CHECKING:
    from vllm_fp8_ranks import Fp8Case


def serve(
    rank: int, meeting: str, case: Fp8Case, exports: Sequence[str]
) -> tuple[list[list[str]], dict[str, int]]:
    """What differs after each refit into poison from what vLLM loads of the export, and how many weights took each route."""
    from vllm_fp8_ranks import _held, _weights
    from vllm_int4 import choose_int4_kernel
    from vllm_ranks import accept_family, groups_of, loaded

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    accept_family(case.served.path_a)
    with groups_of(rank, case.served):
        choose_int4_kernel(case.kernel)
        live, config = loaded(case.served)
        destination = VllmDestination(live, config, torch.device("cpu"))
        wrong = []
        with met(meeting, RANKS + rank, destination) as session:
            for version, folder in enumerate(exports):
                poison(_weights(live))
                session.refit(version)
                expected, _ = loaded(case.served, folder)
                wrong.append(differing(bytes_of(_held(live)), bytes_of(_held(expected))))
            routes = {route: len(session.manifest.specs(route)) for route in ("bulk", "misc", "unused")}
        return wrong, routes
