from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from rlrefit.recipes.policy.state import read_rank_state, write_rank_state
from rlrefit.recipes.run import checkpoint
from rlrefit.recipes.run.checkpoint import MANIFEST, CheckpointStore, LayoutChanged
from rlrefit.workers.trainers.durable import Written

LAYOUT = {"tensor_parallel": 2, "pipeline_parallel": 1, "virtual_pipeline": None}


def save(store: CheckpointStore, step: int) -> None:
    with store.writing(step, {"prompts_seen": step * 8}) as unfinished:
        for rank in range(2):
            name, data = f"rank_{rank:05d}.pt", bytes([step % 256, rank]) * 1000
            (unfinished.folder / name).write_bytes(data)
            unfinished.files[name] = Written(len(data), hashlib.sha256(data).hexdigest())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_checkpoint_is_found_with_what_was_stored_beside_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 5)
    save(store, 10)
    found = CheckpointStore(tmp_path, 3, LAYOUT).latest_good()
    assert found.skipped == ()
    assert found.checkpoint is not None
    assert found.checkpoint.folder == tmp_path / "step_000010"
    assert (found.checkpoint.step, found.checkpoint.extra) == (10, {"prompts_seen": 80})


def test_an_empty_root_has_no_checkpoint(tmp_path: Path) -> None:
    found = CheckpointStore(tmp_path / "new", 3, LAYOUT).latest_good()
    assert found.checkpoint is None
    assert found.skipped == ()


def test_a_truncated_checkpoint_is_skipped_for_the_one_before_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)
    save(store, 2)
    damaged = tmp_path / "step_000002" / "rank_00001.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = store.latest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert [skipped.folder.name for skipped in found.skipped] == ["step_000002"]
    assert found.skipped[0].reason == "rank_00001.pt has 1999 bytes where 2000 were written"


def test_a_single_flipped_bit_is_found_by_the_hash(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)
    file = tmp_path / "step_000001" / "rank_00000.pt"
    data = bytearray(file.read_bytes())
    data[777] ^= 4
    file.write_bytes(data)
    found = store.latest_good()
    assert found.checkpoint is None
    assert "rank_00000.pt has other contents" in found.skipped[0].reason


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is damaged"), ("[]", "is damaged"), (None, "is missing")]
)
def test_a_checkpoint_without_a_readable_manifest_is_skipped(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)
    save(store, 2)
    manifest = tmp_path / "step_000002" / MANIFEST
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    found = store.latest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert reason in found.skipped[0].reason


def test_a_missing_rank_file_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)
    (tmp_path / "step_000001" / "rank_00001.pt").unlink()
    assert store.latest_good().skipped[0].reason == "rank_00001.pt is missing"


def test_another_layout_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, 3, LAYOUT), 4)
    other = CheckpointStore(tmp_path, 3, {**LAYOUT, "tensor_parallel": 4})
    with pytest.raises(LayoutChanged, match=r"step_000004.*tensor_parallel was 2 and is 4"):
        other.latest_good()


def test_a_crash_while_writing_leaves_nothing_but_the_earlier_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)

    def crash() -> None:
        with store.writing(2) as unfinished:
            (unfinished.folder / "rank_00000.pt").write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        crash()
    assert names(tmp_path) == ["step_000001"]


def test_a_leftover_of_a_killed_run_is_ignored_and_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    leftover = tmp_path / "step_000003.tmp"
    leftover.mkdir()
    (leftover / "rank_00009.pt").write_bytes(b"of a run with more ranks")
    assert store.latest_good().checkpoint is None
    save(store, 3)
    assert names(tmp_path) == ["step_000003"]
    files = json.loads((tmp_path / "step_000003" / MANIFEST).read_text())["files"]
    assert sorted(files) == ["rank_00000.pt", "rank_00001.pt"]


def test_only_the_newest_checkpoints_are_kept_counted_by_step_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, LAYOUT)
    for step in (999998, 999999, 1000000):
        save(store, step)
    assert names(tmp_path) == ["step_1000000", "step_999999"]


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, LAYOUT)
    save(store, 1)
    with pytest.raises(FileExistsError, match="step_000001"):
        save(store, 1)


def test_a_save_that_no_rank_took_part_in_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="no rank saved"),
        CheckpointStore(tmp_path, 2, LAYOUT).writing(1),
    ):
        pass


def test_files_that_the_driver_does_not_see_as_they_were_written_are_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, LAYOUT)

    def save_elsewhere(seen: bytes | None) -> None:
        with store.writing(1) as unfinished:
            if seen is not None:
                (unfinished.folder / "rank_00000.pt").write_bytes(seen)
            unfinished.files["rank_00000.pt"] = Written(4, hashlib.sha256(b"data").hexdigest())

    for seen in (None, b"dat"):
        with pytest.raises(ValueError, match=r"rank_00000\.pt"):
            save_elsewhere(seen)
    assert names(tmp_path) == []


def test_the_ranks_hash_what_they_write_and_the_driver_reads_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weights": torch.arange(300_000), "step": 3}
    (name, written), *others = write_rank_state(tmp_path / "alone", 7, state).items()
    data = (tmp_path / "alone" / name).read_bytes()
    assert not others
    assert written == Written(len(data), hashlib.sha256(data).hexdigest())
    assert torch.equal(read_rank_state(tmp_path / "alone", 7)["weights"], state["weights"])

    def read(path: Path) -> str:
        raise AssertionError(f"the driver hashed {path}")

    monkeypatch.setattr(checkpoint, "_sha256", read)
    store = CheckpointStore(tmp_path / "store", 2, LAYOUT)
    with store.writing(1) as unfinished:
        unfinished.files.update(write_rank_state(unfinished.folder, 7, state))
    monkeypatch.undo()
    assert store.latest_good().checkpoint is not None


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, 0, LAYOUT)
