"""Our mixins around the models of NeMo-RL's policy workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.answers import raise_refit_errors
from rlrefit.workers.frameworks.nemo_rl import policy_worker
from rlrefit.workers.frameworks.nemo_rl.engine_calls import require_text_only
from tests.nemo_rl_adapter import megatron_ranks
from tests.refit.models import make_model
from tests.spawn import run_ranks, run_together


def test_a_megatron_policys_shards_reach_an_engine_bit_for_bit_twice(tmp_path: Path) -> None:
    models = [make_model("qwen3", tmp_path / f"model{seed}", seed) for seed in range(3)]
    answers, [wrong] = run_together(
        lambda: run_ranks(megatron_ranks.policy, 2, models, tmp_path, timeout_s=250.0),
        lambda: run_ranks(megatron_ranks.engine, 1, models, tmp_path, timeout_s=250.0),
    )
    for prepared, routes, *records, closed in answers:
        raise_refit_errors([prepared, routes, *records, closed])
        assert (prepared["refused"], routes["misc"], routes["bulk"]) == ({}, 0, prepared["weights"])
        assert [record["version"] for record in records] == [1, 2]
    assert wrong == [[], [], []]


class LinearLoRA(nn.Linear):
    """Named as Automodel's."""


def refused(**worker: Any) -> str:
    answer = policy_worker.prepare(SimpleNamespace(rank=3, **worker), {})
    with pytest.raises(RefitError) as error:
        raise_refit_errors([answer])
    assert error.value.rank == 3
    assert "Nothing was prepared" in str(error.value)
    return str(error.value)


def test_what_nemo_rls_own_export_alone_knows_is_refused_all_at_once() -> None:
    model = nn.Sequential(LinearLoRA(2, 2), LinearLoRA(2, 2))
    model.state_dict_adapter = object()
    text = refused(model=model, dtype=torch.bfloat16, draft_model=object(), cfg={"quant_cfg": "NVFP4"})
    for part in ("state_dict_adapter", "LoRA adapters are merged", "draft model", "quant_cfg"):
        assert part in text
    assert "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine" in text


def test_virtual_pipeline_stages_of_which_a_worker_keeps_one_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    assert "its pipeline has 2 virtual stages" in refused(model=model, megatron_bridge=object())


def test_a_worker_without_what_the_mixins_need_is_refused() -> None:
    assert "it has no dtype" in refused(model=nn.Linear(2, 2))
    assert "it has no model" in refused(megatron_bridge=object())


def test_a_policy_worker_that_was_not_prepared_says_so() -> None:
    answer = policy_worker.refit(SimpleNamespace(rank=1), 1, None)
    with pytest.raises(RefitError, match="was not prepared"):
        raise_refit_errors([answer])
    assert policy_worker.close(SimpleNamespace(rank=1)) == {}


def test_a_multimodal_engine_is_refused() -> None:
    require_text_only(SimpleNamespace(model="Qwen/Qwen3-4B", is_multimodal_model=False))
    with pytest.raises(RefitError, match="multimodal"):
        require_text_only(SimpleNamespace(model="Qwen/Qwen3-VL-4B", is_multimodal_model=True))
