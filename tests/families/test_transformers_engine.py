"""Every family in the transformers engine: what a refit leaves in it is what transformers itself loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ahead import FoundAhead
from tests.spawn import run_ranks

from .checkpoints import config_of, has_prediction, write_pair
from .expected import TRANSFORMERS, UNREAD, is_prediction

FAMILIES = tuple(TRANSFORMERS.misc)
# One that transformers shares evenly: it pads none.
_EVEN = {"vocab_size": 64}


@dataclass(frozen=True)
class Result:
    """What one rank saw of one family: why it is refused, names by route, and what is not as transformers loads it."""

    refused: str
    misc: list[str]
    unused: list[str]
    differing: list[str]


Results = dict[tuple[str, int], list[Result]]


def refit_all(folder: Path) -> Results:
    """By family and tensor parallelism, for each rank."""
    pairs = {family: write_pair(family, folder / family, _EVEN) for family in FAMILIES}
    ranks = run_ranks(_refit, 2, pairs, timeout_s=300)
    alone = {(family, 1): [found[0]] for family, found in ranks[0].items()}
    return alone | {(family, 2): [rank[family][1] for rank in ranks] for family in pairs}


AHEAD = (refit_all,)


def _refit(rank: int, pairs: dict[str, tuple[str, str]]) -> dict[str, tuple[Result, Result]]:
    return {family: (_one(*pair, 1), _one(*pair, 2)) for family, pair in pairs.items()}


def _one(path_a: str, path_b: str, size: int) -> Result:
    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.weights.manifest import TensorSpec
    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    tensors = load_file(f"{path_b}/model.safetensors")
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    live, loaded = (TransformersEngine(path, torch.bfloat16, size) for path in (path_a, path_b))
    destination = live._make_refit_destination()
    try:
        fragments, misc = destination.fragments(specs)
    except RefitError as error:
        return Result(str(error), [], [], [])
    with torch.no_grad():
        for parameter in live.model.parameters():
            parameter.fill_(torch.nan)
        for fragment in fragments:
            fragment.view.copy_(tensors[fragment.name][tuple(slice(*side) for side in fragment.box)])
    destination.load_weights((name, tensors[name]) for name in misc)
    found, expected = live.model.state_dict(), loaded.model.state_dict()
    taken = {fragment.name for fragment in fragments} | misc.keys()
    return Result(
        "",
        sorted(misc),
        sorted(tensors.keys() - taken),
        [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)],
    )


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> Results:
    return found_ahead.by(refit_all)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_poisoned_engine_is_after_a_refit_what_transformers_loads(
    family: str, size: int, results: Results
) -> None:
    layers = config_of(family, short=True)["num_hidden_layers"]
    for rank in results[family, size]:
        assert rank.refused == ""
        assert rank.differing == rank.misc == []
        predictions = {name for name in rank.unused if is_prediction(name, layers)}
        assert set(rank.unused) - predictions == UNREAD.get(family, set())
        assert bool(predictions) == has_prediction(family)
