"""Kimi-K2 or Kimi-K2.5 on two ranks of Megatron, whose weights go into engines with its experts in INT4, by Megatron-Bridge's rule."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tests.fp8_refits import CONFIG, bytes_of, differing, poison
from tests.spawn import PATIENT_S, run_ranks

if TYPE_CHECKING:
    from rlrefit.integration.session import RefitSession

RANKS = 2
# Of Bridge.
SCALE_RULE = "amax/7"


def check_refits(
    folder: Path,
    checkpoint: str,
    serve: Callable[..., Any],
    case: object,
    prefix: str = "language_model.",
    bulk: int = 86,
    **engines: Any,
) -> None:
    """Two refits leave what the engine loads of Bridge's own export, and all but the router goes shard to shard.

    Args:
        folder: for the exports.
        checkpoint: that Bridge is made from.
        serve: of an engine's rank, of ``(rank, meeting, case, exports)``: what :func:`served` returns.
        case: the engine's.
        prefix: of the decoder's weights.
        bulk: how many go shard to shard.
        engines: options of :func:`run_ranks` for the engine's ranks.
    """
    from rlrefit.integration.control import open_rendezvous

    exports = [str(folder / f"exported {version}") for version in range(2)]
    with closing(open_rendezvous("127.0.0.1", RANKS, RANKS)) as server, ThreadPoolExecutor(1) as beside:
        meeting = server.rendezvous.to_json()
        trainers = beside.submit(run_ranks, train, RANKS, meeting, checkpoint, exports, timeout_s=PATIENT_S)
        found = run_ranks(serve, RANKS, meeting, case, exports, timeout_s=PATIENT_S, **engines)
        refused = trainers.result()
    assert [wrong for wrong, _ in found] == [[[], []]] * RANKS
    routers = {f"{prefix}model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")}
    assert all(by_rank.keys() == routers for by_rank in refused)
    assert found[0][1] == {"bulk": bulk, "misc": 2, "unused": 0}


def served(
    rank: int,
    meeting: str,
    destination: Any,
    exports: Sequence[str],
    poisoned: Callable[[], Iterable[torch.Tensor]],
    held: Callable[[], Mapping[str, torch.Tensor]],
    loaded: Callable[[str], Mapping[str, torch.Tensor]],
) -> tuple[list[list[str]], dict[str, int]]:
    """What differs in an engine's rank after each refit from what it loads of the export, and how many weights took each route.

    Args:
        rank: of the engine.
        meeting: with the trainer's ranks.
        destination: the engine's weights.
        exports: as in :func:`train`.
        poisoned: what is overwritten before each refit.
        held: the state that is compared.
        loaded: the same state of an engine that has loaded a checkpoint.
    """
    wrong = []
    with met(meeting, RANKS + rank, destination) as session:
        for version, folder in enumerate(exports):
            poison(poisoned())
            session.refit(version)
            wrong.append(differing(bytes_of(held()), bytes_of(loaded(folder))))
        routes = {route: len(session.manifest.specs(route)) for route in ("bulk", "misc", "unused")}
    return wrong, routes


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
