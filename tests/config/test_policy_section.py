"""What a trainer's own ``policy`` section may hold: every violation is told at once, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.settings import check_nccl_xfer_refit_support, read_settings


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


@pytest.mark.parametrize("refit", [[], "auto", RefitConfig(streams=0)])
def test_a_section_of_another_form_is_refused(refit: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.refit"):
        check_nccl_xfer_refit_support({"refit": refit or ["x"]})


def test_settings_that_the_caller_gives_or_reads_itself_are_none_of_the_section_s() -> None:
    config, wrong = read_settings(
        {"bucket_mb": 7, "lora": "merge", "records_dir": "runs"},
        "p",
        also=("records_dir",),
        without=("lora",),
        bucket_mb=3,
    )
    assert config.bucket_mb == 3
    assert [text.split(" is not known")[0] for text in wrong] == ["p.bucket_mb", "p.lora"]
