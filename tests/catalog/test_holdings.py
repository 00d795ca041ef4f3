"""Storage and holdings: that they agree, that trainers cover all that engines want, brute force on element numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import Box
from rlrefit.integration.plan import analyse
from rlrefit.integration.weights.holdings import Holdings
from rlrefit.recipes.plan.catalog import (
    GenLayout,
    Model,
    Param,
    TrainLayout,
    all_holdings,
    gen_storage,
    train_storage,
    violations,
)
from tests.families.expected import is_prediction

from .shrunken import CONFIGS

_MODELS = {name: Model(name, config) for name, config in CONFIGS.items()}
_SIZES = st.sampled_from((1, 2, 4))
_FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def _train_layouts(draw: st.DrawFn) -> TrainLayout:
    pp = draw(st.sampled_from((1, 2)))
    return TrainLayout(
        tp=draw(_SIZES),
        pp=pp,
        ep=draw(_SIZES),
        etp=draw(st.sampled_from((1, 2))),
        cp=draw(st.sampled_from((1, 2))),
        vpp=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        vocabulary_multiple=draw(st.sampled_from((1, 8, 128))),
    )


# One of each kind of layer.
_KINDS = (
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "nemotron_h",
    "nemotron_h-latent",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "gemma4-moe",
    "glm_moe_dsa",
    "bailing_moe_v2",
)


@st.composite
def _gen_layouts(draw: st.DrawFn) -> GenLayout:
    tp, dp = draw(_SIZES), draw(st.sampled_from((1, 2)))
    return GenLayout(
        tp=tp, dp=dp, pp=draw(st.sampled_from((1, 2))), ep=draw(st.sampled_from((1, tp, tp * dp)))
    )


@_FEW
@given(st.sampled_from(sorted(CONFIGS)), _train_layouts(), _gen_layouts())
def test_trainers_hold_or_refuse_all_that_engines_want_and_holdings_say_what_is_stored(
    name: str, train: TrainLayout, gen: GenLayout
) -> None:
    model = _MODELS[name]
    assume(not violations(model, train) and not violations(model, gen))
    specs = model.specs()
    positions = {spec.name: i for i, spec in enumerate(specs)}
    sources, destinations = all_holdings(model, train, gen, positions)
    for rank, holdings in enumerate(sources):
        assert _content(holdings) == _content_of(train_storage(model, train, rank), positions)
        assert holdings.rank == rank
    for rank, holdings in enumerate(destinations):
        assert _content(holdings) == _content_of(gen_storage(model, gen, rank), positions)
        assert holdings.rank == train.world_size + rank
    # The planner itself refuses a box that nobody holds.
    manifest = analyse(specs, sources, destinations, bucket_bytes=1 << 20).manifest
    prediction = model.architecture.layers
    unused = {spec.name for spec in manifest.specs("unused")}
    assert all(is_prediction(other, prediction) for other in unused)


@_FEW
@given(st.sampled_from(_KINDS), _train_layouts())
def test_each_element_of_a_placed_weight_stands_once_on_each_replica_of_the_trainer(
    name: str, layout: TrainLayout
) -> None:
    """Brute force: element numbers are put into the storages and counted."""
    model = _MODELS[name]
    assume(not violations(model, layout))
    counts: dict[str, torch.Tensor] = {}
    refused: set[str] = set()
    for rank in range(layout.world_size):
        for param in train_storage(model, layout, rank):
            refused |= set(param.refused)
            taken = np.zeros(param.shape, dtype=np.int64)
            for part in param.parts:
                view = taken[part.index].T if part.turned else taken[part.index]
                assert view.shape == tuple(stop - start for start, stop in part.box)
                view += 1
                seen = counts.setdefault(part.name, torch.zeros(part.full_shape, dtype=torch.int64))
                seen = part.axes.see(seen) if part.axes is not None else seen
                seen[tuple(slice(*side) for side in part.box)] += 1
            assert taken.max(initial=0) <= 1, "two weights in one place"
    for spec in model.specs():
        if spec.name not in refused:
            found = counts[spec.name]
            assert found.min() >= 1
            assert found.min() == found.max(), "some elements have more replicas than others"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "llama-tied"])
def test_every_element_that_an_engine_stores_is_a_weights_or_padding(name: str) -> None:
    model = _MODELS[name]
    layout = GenLayout(tp=4)
    for rank in range(4):
        for param in gen_storage(model, layout, rank):
            filled = sum(prod(stop - start for start, stop in part.box) for part in param.parts)
            vocabulary = param.name.endswith(("embed_tokens.weight", "lm_head.weight"))
            assert filled == prod(param.shape) or vocabulary
            assert param.dtype in (torch.bfloat16, torch.float32)


def _content(holdings: Holdings) -> tuple[dict[int, tuple[object, ...]], dict[int, str]]:
    held = {int(i): (tuple(sorted(g.boxes)), g.dtype, g.axes) for g in holdings.groups for i in g.indices}
    return held, {int(i): reason for reason, indices in holdings.refused.items() for i in indices}


def _content_of(
    stored: Iterable[Param], positions: dict[str, int]
) -> tuple[dict[int, tuple[object, ...]], dict[int, str]]:
    boxes: dict[int, list[Box]] = defaultdict(list)
    kinds: dict[int, tuple[object, ...]] = {}
    refused: dict[int, str] = {}
    for param in stored:
        for part in param.parts:
            boxes[positions[part.name]].append(part.box)
            kinds[positions[part.name]] = param.dtype, part.axes
        refused |= {positions[other]: param.reason for other in param.refused}
    return {i: (tuple(sorted(found)), *kinds[i]) for i, found in boxes.items()}, refused
