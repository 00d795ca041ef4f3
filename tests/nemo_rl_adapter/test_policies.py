"""Our mixins around the models of NeMo-RL's policy workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.answers import raise_refit_errors
from rlrefit.workers.frameworks.nemo_rl import policy_worker
from rlrefit.workers.frameworks.nemo_rl.engine_calls import require_text_only
from tests.ahead import FoundAhead
from tests.nemo_rl_adapter.megatron_ranks import refit_twice_by_each

AHEAD = (refit_twice_by_each,)


def test_a_megatron_policys_shards_reach_an_engine_bit_for_bit_twice(found_ahead: FoundAhead) -> None:
    answers, wrong = found_ahead.by(refit_twice_by_each)["nemo_rl"]
    for prepared, routes, *records, closed in answers:
        raise_refit_errors([prepared, routes, *records, closed])
        assert (prepared["refused"], routes["misc"], routes["bulk"]) == ({}, 0, prepared["weights"])
        assert [record["version"] for record in records] == [1, 2]
    assert wrong == [[], [], []]


class LinearLoRA(nn.Linear):
    """Named as Automodel's."""


def model(**attributes: Any) -> nn.Module:
    made = (
        nn.Sequential(LinearLoRA(2, 2), LinearLoRA(2, 2))
        if "state_dict_adapter" in attributes
        else nn.Linear(2, 2)
    )
    made.__dict__.update(attributes)
    return made


# What of a policy worker is there, and what is told of it.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "what NeMo-RL's own export alone knows": (
        {
            "model": model(state_dict_adapter=object()),
            "dtype": torch.bfloat16,
            "draft_model": object(),
            "cfg": {"quant_cfg": "NVFP4"},
        },
        [
            "state_dict_adapter",
            "LoRA",
            "draft model",
            "quant_cfg",
            "checkpoint_engine:NcclXferCheckpointEngine",
        ],
    ),
    "virtual stages of which it keeps one": (
        {
            "model": model(config=SimpleNamespace(virtual_pipeline_model_parallel_size=2)),
            "megatron_bridge": object(),
        },
        ["2 virtual stages"],
    ),
    "no dtype": ({"model": model()}, ["no dtype"]),
    "no model": ({"megatron_bridge": object()}, ["no model"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_mixins_cannot_read_is_refused_all_at_once(case: str) -> None:
    worker, told = REFUSED[case]
    with pytest.raises(RefitError) as error:
        raise_refit_errors([policy_worker.prepare(SimpleNamespace(rank=3, **worker), {})])
    assert error.value.rank == 3
    for part in told:
        assert part in str(error.value)


def test_a_policy_worker_that_was_not_prepared_says_so() -> None:
    answer = policy_worker.refit(SimpleNamespace(rank=1), 1, None)
    with pytest.raises(RefitError, match="was not prepared"):
        raise_refit_errors([answer])
    assert policy_worker.close(SimpleNamespace(rank=1)) == {}


def test_a_multimodal_engine_is_refused() -> None:
    require_text_only(SimpleNamespace(model="Qwen/Qwen3-4B", is_multimodal_model=False))
    with pytest.raises(RefitError, match="multimodal"):
        require_text_only(SimpleNamespace(model="Qwen/Qwen3-VL-4B", is_multimodal_model=True))
