"""A run's account of what happened: whole lines, and no reason for the run to fail."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.loop import TrainingLoop
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.cluster import RunError
from rlrefit.recipes.run.files import FolderInUse, MetricsFile, alone_in, append_json_lines, read_json_lines
from rlrefit.recipes.train import Interrupted, train
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


def test_a_folder_is_one_runs_alone_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from rlrefit.recipes.run.files import alone_in\n"
        "with alone_in(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match=f"process {holder.pid} on "), alone_in(tmp_path):
            pass
        holder.kill()
    with alone_in(tmp_path):
        pass


def test_a_run_whose_folder_another_one_has_starts_nothing_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    config = load_config("grpo_tiny", [f"run_root={tmp_path}", "name=again", "resume=true"])
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with alone_in(folder), pytest.raises(RunError, match=f"{folder} is in use by another run"):
        train(config, Console(file=io.StringIO()))
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_run_that_can_not_go_on_from_its_metrics_names_the_line_and_its_folder_as_it_is(
    tmp_path: Path,
) -> None:
    config = load_config("grpo_tiny", [f"run_root={tmp_path}", "name='again [x]'", "resume=true"])
    config.folder.mkdir()
    (config.folder / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    shown = io.StringIO()
    with pytest.raises(RunError, match=r"metrics\.jsonl:1"):
        train(config, Console(file=shown, width=500))
    assert str(config.folder) in shown.getvalue()


def test_an_interrupt_before_the_ranks_start_says_what_is_saved_too(tmp_path: Path) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    config = load_config("grpo_tiny", [f"run_root={tmp_path}", "resume=true"])
    with pytest.raises(Interrupted, match="no step is saved"):
        train(config, Console(file=Interrupting()))


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with alone_in(tmp_path):
        assert str(tmp_path) in caplog.text


class _Steps(TrainingLoop):
    """The loop whose steps do nothing."""

    def _step(self, step: int) -> dict[str, Any]:
        return {"step": step}


def test_a_step_that_can_not_be_saved_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    elsewhere = SimpleNamespace(
        save=lambda folder: {"rank_00000.pt": Written(1, "0")}
    )  # on another file system
    parts: Any = (elsewhere, SimpleNamespace(state=dict), SimpleNamespace(position={}))
    store, metrics = CheckpointStore(tmp_path / "checkpoints", 1, {}), MetricsFile(tmp_path / "metrics.jsonl")
    config = load_config("grpo_tiny", ["checkpoint.every=1"])
    with pytest.raises(RunError, match=r"step 1 can't be saved: .*rank_00000\.pt"):
        _Steps(config, *parts, store, metrics, lambda line: None).run(1, lambda: False)
    assert list(store.root.iterdir()) == []
