"""Kimi-K2.5 from two ranks of Megatron into two of vLLM with its experts in INT4, each in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tests.fp8_refits import CONFIG, bytes_of, differing, poison

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_fp8_ranks import Fp8Case

    from rlrefit.integration.session import RefitSession

RANKS = 2


def train(rank: int, meeting: str, checkpoint: str, exports: Sequence[str]) -> dict[str, str]:
    """Send one set of weights after the other, each of which Bridge has exported for vLLM's loader before.

    Args:
        rank: of the trainer.
        meeting: with the engine's ranks.
        checkpoint: that Bridge is made from.
        exports: folders of checkpoints, one for each set.

    Returns:
        Weights that this rank's rules refuse, with reasons.
    """
    from rlrefit.workers.trainers.megatron.source import MegatronSource
    from tests.families import ranks
    from tests.families.cases import Layout

    ranks.accept_families()
    bridge, model = ranks.build(Layout(tp=RANKS, ep=RANKS), checkpoint)
    source = MegatronSource(bridge, model)
    with _session(meeting, rank, source) as session:
        for version, folder in enumerate(exports):
            for task in source._tasks:
                ranks.randomize(task, version)
            weights = ranks.exported(bridge, model, unquantized=False)
            if rank == 0:
                _write(Path(checkpoint), Path(folder), weights)
            torch.distributed.barrier()
            session.refit(version)
        return source.fragments()[1]


def _write(like: Path, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from tests.families.checkpoints import quantize_experts

    shutil.copytree(like, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # Bridge has made the codes, and this writes what tells vLLM of them.
    quantize_experts(folder)


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
        with _session(meeting, RANKS + rank, destination) as session:
            for version, folder in enumerate(exports):
                poison(_weights(live))
                session.refit(version)
                expected, _ = loaded(case.served, folder)
                wrong.append(differing(bytes_of(_held(live)), bytes_of(_held(expected))))
            routes = {route: len(session.manifest.specs(route)) for route in ("bulk", "misc", "unused")}
        return wrong, routes


@contextmanager
def _session(meeting: str, rank: int, side: Any) -> Iterator[RefitSession]:
    from rlrefit.integration.control import Rendezvous
    from rlrefit.integration.session import RefitSession

    config = replace(CONFIG, trainer_quantize_fp8=False, trainer_quantize_int4=True, int4_scale="amax/7")
    session = RefitSession.open(Rendezvous.from_json(meeting), rank, lambda: side, config, engine="nccl_xfer")
    try:
        yield session
    finally:
        session.close()
