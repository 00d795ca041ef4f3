"""vLLM's two ranks with the experts of Kimi-K2.5 in INT4, refitted from Megatron's, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tests.families.kimi_trainer import served

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
        return served(
            rank,
            meeting,
            VllmDestination(live, config, torch.device("cpu")),
            exports,
            lambda: _weights(live),
            lambda: _held(live),
            lambda folder: _held(loaded(case.served, folder)[0]),
        )
