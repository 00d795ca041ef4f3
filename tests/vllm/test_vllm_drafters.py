"""Engines that decode speculatively: which drafters a refit leaves as they are, and which it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import PlanError, RefitError
from rlrefit.workers.engines.common.loader_trace.trace import trace_loader
from rlrefit.workers.engines.vllm.destination import VllmDestination
from rlrefit.workers.engines.vllm.drafters import check_follows

POLICY, OTHER = "/models/policy", "/models/eagle"
_EAGLE = {"method": "eagle3", "model": OTHER}
_LOADED = SimpleNamespace(load_format="auto")


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
    _destination(**({"method": method, "model": method, "draft_load_config": None} if method else {}))
    assert not caplog.records


def test_a_drafter_that_is_the_served_checkpoint_itself_is_refused_before_anything_is_written():
    with pytest.raises(RefitError, match="draft_model"):
        _destination(method="draft_model", model=POLICY, draft_load_config=None)


class _Policy(nn.Module):
    """One layer; its loader leaves all else aside, as vLLM's loaders do with MTP layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 3, bias=False)])})
        self.mtp = nn.Linear(2, 3, bias=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in (OWN, TAKEN):
                self.get_parameter(name).data.copy_(tensor)


OWN = "model.layers.0.weight"
# Named as an MTP layer, but of the model that is served: its loader takes it.
TAKEN = "mtp.weight"
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
        [(name, (3, 2), torch.float32) for name in (OWN, TAKEN, *BESIDE, *names)],
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
        speculative_config=SimpleNamespace(method=method),
    )
    check_follows(config, trace)


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_that_the_policy_trains_are_refused_as_drafter_and_left_aside_without_one(name):
    with pytest.raises(PlanError) as caught:
        _follows("mtp", name)
    assert caught.value.parameter == name
    _follows("ngram", name)


@pytest.mark.parametrize(
    ("load_format", "drafter", "told", "random"),
    [
        (
            "auto",
            {"method": "mtp", "model": POLICY, "draft_load_config": None},
            f"(mtp) with {POLICY}",
            False,
        ),
        ("auto", {**_EAGLE, "draft_load_config": None}, f"(eagle3) with {OTHER}", False),
        ("dummy", {**_EAGLE, "draft_load_config": None}, f"(eagle3) with {OTHER}", True),
        ("dummy", {**_EAGLE, "draft_load_config": _LOADED}, f"(eagle3) with {OTHER}", False),
    ],
)
def test_a_drafter_that_no_refit_reaches_is_told_once_and_whether_it_holds_random_numbers(
    load_format, drafter, told, random, caplog
):
    _destination(load_format, **drafter)
    _follows(drafter["method"])
    [record] = caplog.records
    assert told in record.getMessage()
    assert ("random numbers" in record.getMessage()) == random
