"""DAPO on parts of rows: what it adds to ``test_context_parallel_runs`` is a mean over tokens, and more rounds of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ahead import FoundAhead, keeping_time

from .shared_cluster import on_shared_cluster
from .test_context_parallel_runs import assert_alike, train_both
from .test_fsdp_runs import Ran

pytestmark = pytest.mark.full


def _train(folder: Path, ray_address: str) -> dict[str, Ran]:
    return train_both("dapo_tiny", folder, ray_address, "algorithm.max_sampling_rounds=2")


@keeping_time  # Ray gives up starting after half a minute
def train_dapo(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train, folder)


AHEAD = (train_dapo,)


def test_dapo_trains_on_parts_of_rows_as_on_whole_ones(found_ahead: FoundAhead) -> None:
    assert_alike(found_ahead.by(train_dapo))
