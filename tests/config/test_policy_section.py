"""What a trainer's own ``policy`` section may hold: every violation is told at once, before anything is started."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlrefit.integration.config import (
    REFIT_KEYS,
    RefitConfig,
    check_nccl_xfer_refit_support,
    read_settings,
    wrong_type,
)
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.config.schema import TrainConfig


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"nccl_xfer_refit": True, "refit": {"transport": "ipc", "timeout_s": 60, "bucket_mb": 256}},
        {"nccl_xfer_refit": False, "refit": RefitConfig(verify="full"), "model_name": "anything else"},
        {"nccl_xfer_refit": True, "refit": None},
    ],
)
def test_a_section_that_can_be_set_up_passes(policy: dict[str, Any]) -> None:
    check_nccl_xfer_refit_support(policy)


def test_one_error_lists_all_that_is_wrong() -> None:
    policy = {
        "nccl_xfer_refit": "yes",
        "refit": {"transport": "rdma", "streams": True, "bucket": 3, "timeout_s": 0, "verify": None},
    }
    with pytest.raises(ValueError, match="can't be set up") as caught:
        check_nccl_xfer_refit_support(policy)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].split(" is")[0].strip() for line in lines] == [
        "policy.nccl_xfer_refit",
        "policy.refit.streams",
        "policy.refit.bucket",
        "policy.refit.verify",
        "policy.refit.transport",
        "policy.refit.timeout_s",
    ]


def test_values_of_other_types_are_refused_with_all_else_that_is_wrong() -> None:
    given: dict[str, Any] = {
        "bucket_mb": 2.5,
        "timeout_s": "60",
        "port": None,
        "trainer_quantize_fp8": "false",
    }
    with pytest.raises(ValueError, match="fp8") as caught:
        RefitConfig(**given, kv_scales=1, verify=False)  # type: ignore[arg-type]
    told = {text.split(":")[0].removeprefix("policy.refit.") for text in str(caught.value).split("; policy.")}
    assert {name.removeprefix("refit.") for name in told} == {*given, "kv_scales", "verify"}
    assert RefitConfig(timeout_s=np.float64(60)).timeout_s == 60  # which is a float


@pytest.mark.parametrize("refit", [["x"], "auto", [], "", False, RefitConfig.unchecked(streams=0)])
def test_a_section_of_another_form_is_refused(refit: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.refit"):
        check_nccl_xfer_refit_support({"refit": refit})


def test_a_section_has_the_keys_that_it_was_given_and_others_are_told_the_nearest() -> None:
    given = {"timeout": 5, "release": True, "path": "runs", 3: 4, "bucket_mb": 7}
    read = read_settings(
        given | {"verify": "full", "records_dir": "runs", "ratio": 0.1},
        "p",
        keys=("timeout_s", "verify"),
        own={"records_dir": str | None, "released": bool},
        others=("ratio",),
    )
    keys = "the keys of p are timeout_s, verify, records_dir, released, ratio"
    assert read.refit == RefitConfig(verify="full")
    assert read.own == {"records_dir": "runs"}
    assert read.wrong == (
        "p.timeout: there is no such key; did you mean p.timeout_s?",
        "p.release: there is no such key; did you mean p.released?",
        f"p.path: there is no such key; {keys}",
        f"p.3: there is no such key; {keys}",
        f"p.bucket_mb: there is no such key; {keys}",
    )


def test_values_of_a_wrong_type_leave_the_default_and_are_told_with_the_wanted_one() -> None:
    own = {"records_dir": str | None, "released": bool}
    given = {"timeout_s": True, "streams": None, "verify": ["full"], "records_dir": 3, "released": 1}
    read = read_settings(given, "p", own=own)
    assert (read.refit, read.own) == (RefitConfig(), {})
    assert read.wrong == (
        "p.timeout_s: True is not a number; give one",
        "p.streams: null is not a whole number; give one",
        "p.verify: ['full'] is not a string; give one",
        "p.records_dir: 3 is not a string or null; give one",
        "p.released: 1 is not true or false; give one",
    )
    read = read_settings({"timeout_s": 60, "records_dir": None}, "p", own=own)
    assert (read.refit.timeout_s, read.own, read.wrong) == (60, {"records_dir": None}, ())


def test_off_needs_no_quotes_in_a_file(tmp_path: Path) -> None:
    """The pages write it so, and YAML 1.1 reads it as false."""
    section = "{verify: off, delta: off, timeout_s: 60}"
    read = read_settings(OmegaConf.to_container(OmegaConf.create(section)), "p")
    assert (read.refit, read.wrong) == (RefitConfig(verify="off", timeout_s=60), ())
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"defaults: [grpo_tiny, _self_]\nname: mine\npolicy:\n  refit: {section}\n")
    refit = load_config(str(recipe)).policy.refit
    assert (refit.verify, refit.delta, refit.timeout_s) == ("off", "off", 60)
    assert read_settings({"verify": True, "trainer_quantize_fp8": False, "transport": False}, "p").wrong == (
        "p.verify: True is not a string; give one",
        "p.transport: False is not a string; give one",
    )


def test_a_refit_of_values_that_cannot_be_is_refused_as_it_is_made_with_all_that_is_wrong() -> None:
    wrong: dict[str, Any] = {"bucket_mb": -1, "streams": 0, "verify": "always"}
    with pytest.raises(ValueError) as made:
        RefitConfig(**wrong)
    with pytest.raises(ValueError) as read:
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RefitConfig), wrong))
    for told in (str(made.value), str(read.value)):
        assert [key for key in REFIT_KEYS if f"policy.refit.{key}:" in told] == [*wrong]


def test_every_type_of_the_schema_has_words() -> None:
    def types(section: type) -> set[Any]:
        hints = set(get_type_hints(section).values())
        return hints.union(*(types(hint) for hint in hints if is_dataclass(hint)))

    for wanted in types(TrainConfig):
        if not is_dataclass(wanted):
            assert wrong_type("k", object, wanted).endswith("; give one")
