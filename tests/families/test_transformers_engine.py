"""Every family in the transformers engine: what a refit leaves in it is what transformers itself loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ahead import FoundAhead, Work, of_all_tests
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


Results = dict[str, list[Result]]


def refit_on_two(folder: Path) -> Results:
    """By family, for each rank of tensor parallelism."""
    return _refit_on(2, folder)


# What one rank takes whole two take in part.
@of_all_tests
def refit_alone(folder: Path) -> Results:
    return _refit_on(1, folder)


AHEAD = (refit_on_two, refit_alone)


def _refit_on(size: int, folder: Path) -> Results:
    pairs = {family: write_pair(family, folder / family, _EVEN) for family in FAMILIES}
    ranks = run_ranks(_refit, size, pairs, size, timeout_s=300)
    return {family: [rank[family] for rank in ranks] for family in pairs}


def _refit(rank: int, pairs: dict[str, tuple[str, str]], size: int) -> dict[str, Result]:
    return {family: _one(*pair, size) for family, pair in pairs.items()}


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


@pytest.mark.parametrize(
    "refit", [pytest.param(refit_alone, id="1", marks=pytest.mark.full), pytest.param(refit_on_two, id="2")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_poisoned_engine_is_after_a_refit_what_transformers_loads(
    family: str, refit: Work, found_ahead: FoundAhead
) -> None:
    layers = config_of(family, short=True)["num_hidden_layers"]
    for rank in found_ahead.by(refit)[family]:
        assert rank.refused == ""
        assert rank.differing == rank.misc == []
        predictions = {name for name in rank.unused if is_prediction(name, layers)}
        assert set(rank.unused) - predictions == UNREAD.get(family, set())
        assert bool(predictions) == has_prediction(family)
