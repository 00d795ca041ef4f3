"""Checkpoints of a recipe's run: written aside, then named; verified before they are trusted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...workers.trainers.durable import Written, sync

MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_CHUNK = 1 << 22


class LayoutChanged(ValueError):
    """The newest good checkpoint was saved in another layout than the run has now."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: where its files are.
        step: training step after which it was saved.
        layout: the run's layout as its configuration gave it.
        extra: what the driver stored, e.g. the position in the data.
    """

    folder: Path
    step: int
    layout: dict[str, Any]
    extra: dict[str, Any]


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: that the ranks save into.
        files: what they wrote there, by path in the folder; the caller fills it.
    """

    folder: Path
    files: dict[str, Written] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint folder that can't be used, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class LatestGood:
    """The newest usable checkpoint, or None, and the newer ones that were skipped, newest first."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


class CheckpointStore:
    """The checkpoint folders ``step_000010`` … under one root, on a file system that all ranks share.

    The driver opens a step with :meth:`writing`, has the ranks save into the folder it gets, which hash what they write,
    and leaves the block. Their hashes are then written into a manifest, and the folder gets its name. A crash at any
    point leaves the earlier checkpoints as they were.

    Args:
        root: made if missing.
        keep: how many of the newest checkpoints stay; older ones are removed after each save.
        layout: of the run: plain values as JSON has them, ``dataclasses.asdict(layout)`` for instance.

    Raises:
        ValueError: ``keep`` is below 1.
    """

    def __init__(self, root: str | Path, keep: int, layout: Mapping[str, Any]) -> None:
        if keep < 1:
            raise ValueError(
                f"keep is {keep}: every checkpoint would be removed once written; give at least 1"
            )
        self.root = Path(root)
        self.keep = keep
        # As JSON gives it back, so that a layout equals the one in its manifest.
        self.layout: dict[str, Any] = json.loads(json.dumps(dict(layout)))
        self.root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self, step: int, extra: Mapping[str, Any] | None = None) -> Iterator[Unfinished]:
        """Write the checkpoint of ``step``: yields the folder to save into, and completes it on leaving.

        If the block raises, the unfinished folder is removed and the error goes on.

        Raises:
            FileExistsError: there is a checkpoint of that step already.
            ValueError: the block listed no file, or a file that is not in the folder or has another size.
        """
        final = self.root / f"step_{step:06d}"
        if final.exists():
            raise FileExistsError(
                f"checkpoint {final} exists; resume from it, or give the run another checkpoint folder"
            )
        aside = final.with_name(final.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            unfinished = Unfinished(aside)
            yield unfinished
            self._complete(unfinished, step, dict(extra or {}))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        aside.replace(final)
        sync(self.root)
        self._prune()

    def latest_good(self) -> LatestGood:
        """The newest checkpoint whose files are those of its manifest, byte for byte.

        Returns:
            It (None if there is none), and the newer ones that are damaged, each with the reason.

        Raises:
            LayoutChanged: it was saved in another layout: each rank's file holds that rank's shards.
        """
        skipped: list[Skipped] = []
        for folder in reversed(self._folders()):
            checkpoint, fault = _verify(folder)
            if checkpoint is None:
                skipped.append(Skipped(folder, fault))
                continue
            if checkpoint.layout != self.layout:
                raise LayoutChanged(_layout_change(checkpoint, self.layout))
            return LatestGood(checkpoint, tuple(skipped))
        return LatestGood(None, tuple(skipped))

    def newest(self) -> Path | None:
        """The newest checkpoint's folder, whose files are not read; None if there is none."""
        return next(reversed(self._folders()), None)

    def set_aside(self, skipped: Skipped) -> Path:
        """Rename a checkpoint that can't be used, so that its step can be saved again; returns the new folder."""
        aside = skipped.folder.with_name(f"{skipped.folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        skipped.folder.replace(aside)
        return aside

    def _complete(self, unfinished: Unfinished, step: int, extra: dict[str, Any]) -> None:
        folder, files = unfinished.folder, unfinished.files
        if not files:
            raise ValueError(f"the checkpoint of step {step} has no files: no rank saved into {folder}")
        for name, written in files.items():
            if (size := _size(folder / name)) != written.size:
                here = "is not there" if size is None else f"has {size} bytes there"
                raise ValueError(
                    f"the checkpoint of step {step} is not whole: a rank wrote {written.size} bytes of {name} into {folder}, "
                    f"and for the driver it {here}; the ranks must see the driver's file system"
                )
        told = {name: asdict(written) for name, written in files.items()}
        manifest = {"step": step, "layout": self.layout, "extra": extra, "files": told}
        path = folder / MANIFEST
        path.write_text(json.dumps(manifest, indent=1, sort_keys=True))
        sync(path)
        for inner in {(folder / name).parent for name in files} | {folder}:
            sync(inner)

    def _folders(self) -> list[Path]:
        named = [(p, _STEP_FOLDER.fullmatch(p.name)) for p in self.root.iterdir() if p.is_dir()]
        return [p for p, match in sorted(named, key=lambda e: int(e[1][1]) if e[1] else -1) if match]

    def _prune(self) -> None:
        for folder in self._folders()[: -self.keep]:
            shutil.rmtree(folder)


def _verify(folder: Path) -> tuple[Checkpoint | None, str]:
    """The folder's checkpoint, or None and what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        checkpoint = Checkpoint(folder, manifest["step"], manifest["layout"], manifest["extra"])
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return None, f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{MANIFEST} is damaged ({error!r})"
    # Sizes of all files before any hash: a cut-off file is found without reading terabytes.
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return None, f"{name} is missing"
        if path.stat().st_size != size:
            return None, f"{name} has {path.stat().st_size} bytes where {size} were written"
    # Many at a time: hashing one takes a core, which Python lets go meanwhile.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(_sha256, [folder / name for name in expected])
        for (name, (_, digest)), other in zip(expected.items(), found, strict=True):
            if other != digest:
                return None, f"{name} has other contents than were written (sha256 differs)"
    return checkpoint, ""


def _layout_change(checkpoint: Checkpoint, layout: dict[str, Any]) -> str:
    keys = sorted(checkpoint.layout.keys() | layout.keys())
    changes = [
        f"{key} was {checkpoint.layout.get(key)!r} and is {layout.get(key)!r}"
        for key in keys
        if checkpoint.layout.get(key) != layout.get(key)
    ]
    return (
        f"checkpoint {checkpoint.folder} was saved in another layout: {'; '.join(changes)}. Each rank's file holds "
        "that rank's shards, so it can't be resumed so; restore the layout, or start anew in another checkpoint "
        "folder"
    )


def _size(path: Path) -> int | None:
    """A file's present size; None if there is none. It is opened because a network file system may cache an old size."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
