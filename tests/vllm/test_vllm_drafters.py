"""Engines that decode speculatively: which drafters a refit leaves as they are, and which it refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import PlanError, RefitError
from rlrefit.workers.engines.common.loader_trace.trace import trace_loader
from rlrefit.workers.engines.vllm import drafters
from rlrefit.workers.engines.vllm.destination import VllmDestination

POLICY, OTHER = "/models/policy", "/models/eagle"


def _destination(load_format: str = "auto", **speculative: Any) -> VllmDestination:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=False),
        model_config=SimpleNamespace(model=POLICY),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=SimpleNamespace(**speculative) if speculative else None,
    )
    return VllmDestination(nn.Linear(2, 3), config, torch.device("cpu"))


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "suffix"])
def test_an_engine_without_a_drafter_and_one_whose_drafts_need_no_weights_are_taken_in_silence(
    method, caplog
):
    with caplog.at_level(logging.WARNING, logger=drafters.logger.name):
        _destination(**({"method": method, "model": method, "draft_load_config": None} if method else {}))
    assert not caplog.records


def test_a_drafter_that_is_the_served_checkpoint_itself_is_refused_before_anything_is_written():
    with pytest.raises(
        RefitError, match=r"speculatively \(draft_model\).*weights of its start.*without speculative_config"
    ):
        _destination(method="draft_model", model=POLICY, draft_load_config=None)


class _Policy(nn.Module):
    """One layer; its loader leaves all else aside, as vLLM's loaders do with MTP layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 3, bias=False)])})

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == OWN:
                self.get_parameter(name).data.copy_(tensor)


OWN = "model.layers.0.weight"
# Another rank's and another part's: what this rank leaves aside is no MTP layer for that alone.
BESIDE = ("model.layers.1.weight", "vision_tower.encoder.layers.9.weight", "lm_head.weight")
MTP = [
    "model.layers.2.eh_proj.weight",
    "language_model.model.layers.2.mlp.up_proj.weight",
    "mtp.fc.weight",
    "model.mtp.layers.0.eh_proj.weight",
    "model.mtp_layers.0.input_proj.weight",
    "model.mtp_block.0.mlp.up_proj.weight",
]


def _follows(method: str, *names: str) -> None:
    policy = _Policy()
    trace = trace_loader(
        policy.load_weights,
        dict(policy.named_parameters()),
        [(name, (3, 2), torch.float32) for name in (OWN, *BESIDE, *names)],
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
        speculative_config=SimpleNamespace(method=method),
    )
    drafters.check_follows(config, trace)


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_that_the_policy_trains_are_refused_as_drafter_and_left_aside_without_one(name):
    with pytest.raises(
        PlanError, match=r"\(mtp\).*has 1 of their weights.*without speculative_config"
    ) as caught:
        _follows("mtp", name)
    assert caught.value.parameter == name
    _follows("ngram", name)


def test_mtp_layers_that_the_policy_does_not_train_stay_as_drafter_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger=drafters.logger.name):
        _destination(method="mtp", model=POLICY, draft_load_config=None)
        _follows("mtp")
    [record] = caplog.records
    assert f"(mtp) with {POLICY}" in record.getMessage()
    assert "fewer tokens are accepted" in record.getMessage()


def test_a_drafter_of_another_checkpoint_is_told_to_stay_as_it_is(caplog):
    with caplog.at_level(logging.WARNING, logger=drafters.logger.name):
        _destination(method="eagle3", model=OTHER, draft_load_config=None)
    [record] = caplog.records
    for part in (
        f"(eagle3) with {OTHER}",
        "weights of its start",
        "fewer tokens are accepted",
        "sleep at level 1",
    ):
        assert part in record.getMessage()
    assert "random" not in record.getMessage()


def test_a_drafter_that_was_started_without_weights_is_told_to_hold_random_numbers(caplog):
    with caplog.at_level(logging.WARNING, logger=drafters.logger.name):
        _destination("dummy", method="eagle3", model=OTHER, draft_load_config=None)
        _destination(
            "dummy", method="eagle3", model=OTHER, draft_load_config=SimpleNamespace(load_format="auto")
        )
    assert ["random numbers" in record.getMessage() for record in caplog.records] == [True, False]
