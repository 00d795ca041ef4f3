"""Prints the lines of a lock file that the running Python's environment does not hold whole.

    python requirements/pending.py requirements/lock.txt

pip takes a package as installed as soon as its metadata is there, also if the installation was cut off
before all files were. Here a package counts only if it is there once, in the locked version, and with
every file of its RECORD in the recorded size. What fails that is removed, so that pip installs it anew.
Standard library only: it runs in an environment that holds nothing yet.
"""

from __future__ import annotations

import csv
import re
import shutil
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path


def normalized(name: str) -> str:
    """The form in which PyPI compares project names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: Path) -> dict[str, str]:
    """Version by normalized name; raises ``ValueError`` for a line that pins no version."""
    versions = {}
    for number, line in enumerate(lock.read_text().splitlines(), start=1):
        requirement = line.split("#", 1)[0].strip()
        if not requirement:
            continue
        name, pin, version = requirement.partition("==")
        if not pin or not version:
            raise ValueError(f"{lock}:{number}: {requirement!r} pins no version; write NAME==VERSION")
        versions[normalized(name)] = version
    return versions


def recorded_files(distribution: Distribution) -> Iterator[tuple[Path, int | None]]:
    """Path and size (None for compiled caches) of all that the RECORD names.

    ``Distribution.files`` does not serve: it leaves out what is missing.
    """
    for path, _, size in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        yield Path(str(distribution.locate_file(path))), int(size) if size else None


def is_whole(distribution: Distribution) -> bool:
    """Whether there is a RECORD and every file that it names has its recorded size."""
    files = list(recorded_files(distribution))
    sized = [(path, size) for path, size in files if size is not None]
    return bool(files) and all(path.is_file() and path.stat().st_size == size for path, size in sized)


def remove(damaged: list[Distribution], name: str, site: Path, prefix: Path) -> None:
    """Deletes a package's files and metadata; pip refuses to uninstall one without a RECORD."""
    for distribution in damaged:
        for path, _ in recorded_files(distribution):
            if path.resolve().is_relative_to(prefix.resolve()):
                path.unlink(missing_ok=True)
    for folder in site.glob("*.dist-info"):
        if normalized(folder.name.split("-", 1)[0]) == name:
            shutil.rmtree(folder)


def pending(lock: Path, site: Path, prefix: Path) -> list[str]:
    """The requirements that ``site`` lacks, after removing what is damaged.

    Args:
        lock: file of ``NAME==VERSION`` lines.
        site: the environment's ``site-packages``.
        prefix: the environment's root; nothing outside it is deleted.
    """
    for leftover in site.glob("~*"):  # pip renames what it is about to replace; a kill leaves it behind
        shutil.rmtree(leftover)
    for folder in site.glob("*.dist-info"):  # cut off before the file that names the package was written
        if not (folder / "METADATA").is_file():
            shutil.rmtree(folder)

    installed: dict[str, list[Distribution]] = defaultdict(list)
    for distribution in distributions(path=[str(site)]):
        installed[normalized(distribution.name)].append(distribution)

    lines = []
    for name, version in locked_versions(lock).items():
        found = installed[name]
        whole = len(found) == 1 and is_whole(found[0])
        if whole and found[0].version == version:
            continue
        if not whole:  # a whole package in another version is pip's to replace
            remove(found, name, site, prefix)
        lines.append(f"{name}=={version}")
    return lines


if __name__ == "__main__":
    environment = Path(sysconfig.get_path("purelib"))
    for line in pending(Path(sys.argv[1]), environment, Path(sys.prefix)):
        sys.stdout.write(f"{line}\n")
