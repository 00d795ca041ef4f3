"""Engines that decode speculatively: which drafters a refit leaves as they are, and which it refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.vllm import drafters
from rlrefit.workers.vllm.destination import VllmDestination

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


@pytest.mark.parametrize(
    ("method", "model"), [("mtp", POLICY), ("longcat_flash_mtp", OTHER), ("draft_model", POLICY)]
)
def test_a_drafter_of_the_policys_own_weights_is_refused_before_anything_is_written(method, model):
    with pytest.raises(
        RefitError, match=rf"speculatively \({method}\).*weights of its start.*without speculative_config"
    ):
        _destination(method=method, model=model, draft_load_config=None)


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
