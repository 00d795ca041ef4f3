from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
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
    store = CheckpointStore(tmp_path / "new", 3, LAYOUT)
    assert store.latest_good().checkpoint is None
    save(store, 5)
    save(store, 10)
    with pytest.raises(FileExistsError, match="step_000010"):
        save(store, 10)
    found = CheckpointStore(tmp_path / "new", 3, LAYOUT).latest_good()
    assert found.skipped == ()
    assert found.checkpoint is not None
    assert found.checkpoint.folder == tmp_path / "new" / "step_000010"
    assert (found.checkpoint.step, found.checkpoint.extra) == (10, {"prompts_seen": 80})


def flip_a_bit(data: bytes) -> bytes:
    return data[:777] + bytes([data[777] ^ 4]) + data[778:]


# The file, what becomes of its bytes, and why the checkpoint is skipped.
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "truncated": ("rank_00001.pt", lambda data: data[:-1], "rank_00001.pt has 1999 bytes"),
    "a flipped bit": ("rank_00000.pt", flip_a_bit, "rank_00000.pt has other contents"),
    "gone": ("rank_00001.pt", None, "rank_00001.pt is missing"),
    "no JSON": (MANIFEST, lambda data: b"{", "is damaged"),
    "no manifest": (MANIFEST, lambda data: b"[]", "is damaged"),
    "no manifest at all": (MANIFEST, None, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(tmp_path: Path, damage: str) -> None:
    name, change, reason = DAMAGES[damage]
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)
    save(store, 2)
    file = tmp_path / "step_000002" / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    found = store.latest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    [skipped] = found.skipped
    assert skipped.folder.name == "step_000002"
    assert reason in skipped.reason


def test_another_layout_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, 3, LAYOUT), 4)
    other = CheckpointStore(tmp_path, 3, {**LAYOUT, "tensor_parallel": 4})
    with pytest.raises(LayoutChanged, match=r"step_000004.*tensor_parallel was 2 and is 4"):
        other.latest_good()


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


@pytest.mark.parametrize("seen", [None, b"dat", b"data", "nothing saved"])
def test_a_save_that_fails_leaves_nothing_but_the_earlier_checkpoints(
    tmp_path: Path, seen: bytes | str | None
) -> None:
    """The driver does not see a file as it was written; it sees it and crashes; or no rank took part."""
    store = CheckpointStore(tmp_path, 3, LAYOUT)
    save(store, 1)

    def save_so() -> None:
        with store.writing(2) as unfinished:
            if isinstance(seen, bytes):
                (unfinished.folder / "rank_00000.pt").write_bytes(seen)
            if not isinstance(seen, str):
                unfinished.files["rank_00000.pt"] = Written(4, hashlib.sha256(b"data").hexdigest())
            if seen == b"data":
                raise OSError("disk full")

    with pytest.raises(OSError if seen == b"data" else ValueError):
        save_so()
    assert names(tmp_path) == ["step_000001"]


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
