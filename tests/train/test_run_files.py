"""A run's account of what happened: whole lines, and no reason for the run to fail."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.loop import TrainingLoop
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.cluster import RunError
from rlrefit.recipes.run.files import MetricsFile, append_json_lines, read_json_lines
from rlrefit.workers.trainers.durable import HashedFile, Written


def test_a_full_disk_is_told_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")  # takes no byte: no space left on device
    with caplog.at_level(logging.ERROR):
        for version in range(3):
            append_json_lines(full, [{"version": version}])
    assert len([record for record in caplog.records if str(full) in record.getMessage()]) == 1


def test_rows_follow_each_other_whole_once_the_file_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    file = folder / "refits.jsonl"
    with caplog.at_level(logging.ERROR):
        append_json_lines(file, [{"version": 1}])
        folder.mkdir()
        append_json_lines(file, [{"version": 2}, {"version": 3}])
        folder.rename(tmp_path / "gone")
        append_json_lines(file, [{"version": 4}])
    assert read_json_lines(tmp_path / "gone" / file.name) == [{"version": 2}, {"version": 3}]
    assert len(caplog.records) == 2, "each loss is told"


def test_a_state_that_finds_the_disk_full_says_so_and_where() -> None:
    with pytest.raises(OSError) as told, HashedFile(Path("/dev/full")) as file:
        torch.save({"weight": torch.zeros(1 << 16)}, file)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, "/dev/full")


class _Steps(TrainingLoop):
    """The loop whose steps do nothing."""

    def _step(self, step: int) -> dict[str, Any]:
        return {"step": step}


def test_a_step_that_can_not_be_saved_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    elsewhere = SimpleNamespace(
        save=lambda folder: {"rank_00000.pt": Written(1, "0")}
    )  # on another file system
    parts: Any = (elsewhere, None, SimpleNamespace(position={}))
    store, metrics = CheckpointStore(tmp_path / "checkpoints", 1, {}), MetricsFile(tmp_path / "metrics.jsonl")
    config = load_config("grpo_tiny", ["checkpoint.every=1"])
    with pytest.raises(RunError, match=r"step 1 can't be saved: .*rank_00000\.pt"):
        _Steps(config, *parts, store, metrics, lambda line: None).run(1, lambda: False)
    assert list(store.root.iterdir()) == []
