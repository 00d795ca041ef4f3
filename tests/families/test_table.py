"""The planner routes the families as the trainer and the engines do."""

from __future__ import annotations

import pytest

from rlrefit.recipes.plan.catalog import Model, bundled_models, open_model
from rlrefit.recipes.plan.catalog.families import FAMILIES
from tests.ahead import left_to_all

from .checkpoints import CONFIGS
from .expected import MISC, SGLANG, TRANSFORMERS, VLLM, is_of, is_prediction
from .table import planned, true_share

# By model type, and whether its experts are latent: the first that is bundled. make test-all has the other sizes too.
_ONE_OF_EACH = {
    (config["model_type"], "moe_latent_size" in config): name
    for name in reversed(bundled_models())
    for config in [open_model(name).config]
}
_MORE = {*bundled_models()} - {*_ONE_OF_EACH.values()}
_PLANNED = [family for family in VLLM.misc if CONFIGS[family]["model_type"] in FAMILIES]


@pytest.mark.parametrize("name", left_to_all(bundled_models(), _MORE))
def test_almost_all_bytes_of_true_shapes_arrive_shard_to_shard(name: str) -> None:
    assert all(true_share(name, engine) > 0.999 for engine in (VLLM, TRANSFORMERS, SGLANG))


@pytest.mark.parametrize("family", _PLANNED)
def test_the_planner_sends_past_the_shards_what_the_trainer_and_the_live_engine_refuse(family: str) -> None:
    config = CONFIGS[family]
    refused = (*MISC.get(family, ()), *VLLM.misc[family])
    layers = config["num_hidden_layers"]
    routes = {entry.spec.name: entry.route for entry in planned(Model(family, config))[0]}
    assert {name for name, route in routes.items() if route == "misc"} == {
        name for name in routes if is_of(name, refused) and not is_prediction(name, layers)
    }
    assert {name for name, route in routes.items() if route == "unused"} == {
        name for name in routes if is_prediction(name, layers)
    }
    assert "bulk" in routes.values()
