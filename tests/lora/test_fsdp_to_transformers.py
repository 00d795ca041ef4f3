"""LoRA from real FSDP2 ranks, between steps of a real optimizer, to real transformers engines: bit for bit peft's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ahead import FoundAhead
from tests.fsdp.models import make_model
from tests.fsdp.ranks import Layout

from .ranks import VERSIONS, Case, Report, run_cases

_ALL = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}
_SOME = {
    "r": 6,
    "lora_alpha": 5,
    "use_rslora": True,
    "target_modules": ["q_proj", "o_proj", "down_proj", "embed_tokens"],
    "modules_to_save": ["lm_head"],
}
_FEW = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 2}}
_ONE = {"default": _ALL}
CASES: dict[str, dict[str, Any]] = {
    "merged, one rank": {"layout": Layout(1), "adapters": _ONE},
    "merged, FSDP2": {"layout": Layout(2), "adapters": _ONE},
    "merged, FSDP2, the conventional way": {
        "layout": Layout(2),
        "adapters": _ONE,
        "engine": "packed_broadcast",
    },
    "merged, FSDP2 x TP2": {"layout": Layout(2, tensor=2), "adapters": _ONE, "gen_tp": 1},
    "two adapters merged, embeddings and lm_head too, FSDP2 on the CPU, never resharded": {
        "layout": Layout(2, offload=True, reshard=False),
        "adapters": {"default": _SOME, "b": _FEW},
    },
    "merged into BF16, FSDP4": {
        "layout": Layout(4, dtype=torch.bfloat16),
        "adapters": _ONE,
        "refit_dtype": None,
    },
    "adapter alone, FSDP2": {"layout": Layout(2), "adapters": _ONE, "lora": "adapter", "gen_tp": 1},
    "adapter alone of another name, FSDP2 x TP2, the conventional way": {
        "layout": Layout(2, tensor=2),
        "adapters": {"policy": _FEW},
        "lora": "adapter",
        "gen_tp": 1,
        "engine": "packed_broadcast",
    },
}
Reports = dict[str, tuple[list[Report], list[Report]]]


def run_all_cases(folder: Path) -> Reports:
    """What all ranks saw in all cases."""
    model = make_model("qwen3", folder / "qwen3")
    cases = []
    for number, fields in enumerate(CASES.values()):
        own = folder / f"case{number}"
        own.mkdir()
        cases.append(Case(own, model, **fields))
    return dict(zip(CASES, run_cases(cases), strict=True))


AHEAD = (run_all_cases,)


@pytest.fixture(scope="module")
def reports(found_ahead: FoundAhead) -> Reports:
    return found_ahead.by(run_all_cases)


@pytest.mark.parametrize("name", CASES)
def test_engines_hold_what_peft_makes_of_the_whole_model_after_every_step(
    name: str, reports: Reports
) -> None:
    trainers, engines = reports[name]
    assert [report.wrong for report in engines] == [[], []]
    assert trainers[0].wrong == []
    assert [len(report.records) for report in engines] == [VERSIONS, VERSIONS]
    if "engine" not in CASES[name]:
        # All but the settings of an adapter goes shard to shard.
        manifest = trainers[0].manifest
        settings = ["adapter_config.json"] if CASES[name].get("lora") == "adapter" else []
        assert list(manifest["misc_reasons"]) == settings
        assert manifest["unused"] == 0
        assert manifest["bulk"] > 0


def test_an_adapter_alone_is_a_fraction_of_the_model(reports: Reports) -> None:
    whole, alone = (
        sum(rank.records[-1]["bytes_bulk"] for rank in reports[name][0] if rank.records)
        for name in ("merged, FSDP2", "adapter alone, FSDP2")
    )
    assert alone < whole
