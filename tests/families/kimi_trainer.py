"""Kimi-K2 or Kimi-K2.5 on two ranks of Megatron, whose weights go into engines with its experts in INT4, by Megatron-Bridge's rule."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tests.fp8_refits import CONFIG

if TYPE_CHECKING:
    from rlrefit.integration.session import RefitSession

RANKS = 2
# Of Bridge.
SCALE_RULE = "amax/7"


def train(rank: int, meeting: str, checkpoint: str, exports: Sequence[str]) -> dict[str, str]:
    """Send one set of weights after the other, each of which Bridge has exported for the engine's loader before.

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
    with met(meeting, rank, source) as session:
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
    # Of Kimi-K2.5 Bridge has made the codes by this rule, and this writes what tells engines of them.
    quantize_experts(folder, SCALE_RULE)


@contextmanager
def met(meeting: str, rank: int, side: Any) -> Iterator[RefitSession]:
    """A session of ``side``, a source or a destination."""
    from rlrefit.integration.control import Rendezvous
    from rlrefit.integration.session import RefitSession

    config = replace(CONFIG, trainer_quantize_fp8=False, trainer_quantize_int4=True, int4_scale=SCALE_RULE)
    session = RefitSession.open(Rendezvous.from_json(meeting), rank, lambda: side, config, engine="nccl_xfer")
    try:
        yield session
    finally:
        session.close()
