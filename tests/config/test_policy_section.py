"""What a trainer's own ``policy`` section may hold: every violation is told at once, before anything is started."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from rlrefit.integration.config import (
    REFIT_KEYS,
    RefitConfig,
    check_nccl_xfer_refit_support,
    read_settings,
    wrong_type,
)
from rlrefit.recipes.config.schema import TrainConfig


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"nccl_xfer_refit": True, "model_name": "anything else"},
        {"nccl_xfer_refit": True, "refit": {"transport": "ipc", "timeout_s": 60, "bucket_mb": 256}},
        {"nccl_xfer_refit": False, "refit": RefitConfig(verify="full")},
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


@pytest.mark.parametrize("refit", [[], "auto", RefitConfig.unchecked(streams=0)])
def test_a_section_of_another_form_is_refused(refit: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.refit"):
        check_nccl_xfer_refit_support({"refit": refit or ["x"]})


@pytest.mark.parametrize("refit", [[], "", False])
def test_an_empty_value_that_is_no_section_is_none_either(refit: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.refit: .* stands for a whole section"):
        check_nccl_xfer_refit_support({"refit": refit})


def test_a_mistyped_key_is_told_the_nearest_and_one_without_a_near_one_all_that_there_are() -> None:
    read = read_settings(
        {"timeout": 5, "release": True, "path": "runs", 3: 4},
        "p",
        keys=("timeout_s", "verify"),
        own={"released": bool},
        others=("ratio",),
    )
    keys = "the keys of p are timeout_s, verify, released, ratio"
    assert read.wrong == (
        "p.timeout: there is no such key; did you mean p.timeout_s?",
        "p.release: there is no such key; did you mean p.released?",
        f"p.path: there is no such key; {keys}",
        f"p.3: there is no such key; {keys}",
    )


def test_a_section_has_the_keys_that_it_was_given_and_no_others() -> None:
    read = read_settings(
        {"bucket_mb": 7, "verify": "full", "records_dir": "runs", "ratio": 0.1},
        "p",
        keys=("timeout_s", "verify"),
        own={"records_dir": str | None, "released": bool},
        others=("ratio",),
    )
    assert read.refit == RefitConfig(verify="full")
    assert read.own == {"records_dir": "runs"}
    assert [text.split(": there is no such key")[0] for text in read.wrong] == ["p.bucket_mb"]


def test_values_of_a_wrong_type_leave_the_default_and_are_told_with_the_wanted_one() -> None:
    read = read_settings(
        {"timeout_s": True, "streams": None, "verify": ["full"], "records_dir": 3, "released": 1},
        "p",
        own={"records_dir": str | None, "released": bool},
    )
    assert read.refit == RefitConfig()
    assert read.own == {}
    assert read.wrong == (
        "p.timeout_s: True is not a number; give one",
        "p.streams: null is not a whole number; give one",
        "p.verify: ['full'] is not a string; give one",
        "p.records_dir: 3 is not a string or null; give one",
        "p.released: 1 is not true or false; give one",
    )


def test_null_and_whole_numbers_stand_where_the_type_has_them() -> None:
    read = read_settings({"timeout_s": 60, "records_dir": None}, "p", own={"records_dir": str | None})
    assert (read.refit.timeout_s, read.own, read.wrong) == (60, {"records_dir": None}, ())


def test_a_refit_of_values_that_cannot_be_is_refused_as_it_is_made_with_all_that_is_wrong() -> None:
    with pytest.raises(ValueError) as made:
        RefitConfig(bucket_mb=-1, streams=0, verify="always")
    merged = OmegaConf.merge(
        OmegaConf.structured(RefitConfig), {"bucket_mb": -1, "streams": 0, "verify": "always"}
    )
    with pytest.raises(ValueError) as read:
        OmegaConf.to_object(merged)
    for told in (str(made.value), str(read.value)):
        assert [key for key in REFIT_KEYS if f"policy.refit.{key}:" in told] == [
            "bucket_mb",
            "streams",
            "verify",
        ]


def test_every_type_of_the_schema_has_words() -> None:
    def types(section: type) -> set[Any]:
        hints = set(get_type_hints(section).values())
        return hints.union(*(types(hint) for hint in hints if is_dataclass(hint)))

    for wanted in types(TrainConfig):
        if not is_dataclass(wanted):
            assert wrong_type("k", object, wanted).endswith("; give one")
