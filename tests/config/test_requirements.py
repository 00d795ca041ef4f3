"""The locked environment: what counts as installed, and what the lock file and the package say."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


sys.path.insert(0, str(ROOT / "requirements"))
import pending  # noqa: E402


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment that holds ``left-pad`` 1.0 and ``other`` 2.0, as a lock file asks for."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    for name, version in (("left_pad", "1.0"), ("other", "2.0")):
        install(folder, name, version)
    (tmp_path / "lock.txt").write_text("# pinned\nleft-pad==1.0\nOther==2.0\n")
    return folder


def install(site: Path, name: str, version: str) -> None:
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    record = []
    for path, text in files.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}")
    record += [f"__pycache__/{name}.cpython-312.pyc,,", f"{name}-{version}.dist-info/RECORD,,"]
    (site / f"{name}-{version}.dist-info" / "RECORD").write_text("\n".join(record))


def missing(site: Path) -> list[str]:
    return pending.pending(site.parents[1] / "lock.txt", site, site.parents[1])


def test_a_package_with_a_file_missing_or_cut_off_is_installed_anew(site: Path) -> None:
    assert missing(site) == []
    (site / "left_pad.py").unlink()
    (site / "other.py").write_text("ver")
    assert missing(site) == ["left-pad==1.0", "other==2.0"]
    assert not list(site.glob("*.dist-info"))  # else pip would take them as installed
    assert not (site / "other.py").exists()


@pytest.mark.parametrize("file", ["RECORD", "METADATA"])
def test_a_package_cut_off_before_its_metadata_were_written_is_installed_anew(site: Path, file: str) -> None:
    (site / "left_pad-1.0.dist-info" / file).unlink()
    assert missing(site) == ["left-pad==1.0"]
    assert not (site / "left_pad-1.0.dist-info").exists()


def test_another_version_is_left_for_pip_to_replace_and_two_versions_are_both_removed(site: Path) -> None:
    (site.parents[1] / "lock.txt").write_text("left-pad==1.1\nother==2.0\n")
    assert missing(site) == ["left-pad==1.1"]
    assert (site / "left_pad.py").exists()
    install(site, "left_pad", "0.9")
    assert missing(site) == ["left-pad==1.1"]
    assert not list(site.glob("left_pad*"))
    assert (site / "other.py").exists()


def test_what_pip_had_put_aside_when_it_was_killed_is_removed(site: Path) -> None:
    (site / "~eft_pad").mkdir()
    assert missing(site) == []
    assert not (site / "~eft_pad").exists()


def test_a_lock_line_without_a_version_is_named_by_its_line(site: Path) -> None:
    (site.parents[1] / "lock.txt").write_text("left-pad==1.0\nother>=2\n")
    with pytest.raises(ValueError, match=r"lock\.txt:2: 'other>=2'"):
        missing(site)


def requirements(name: str) -> list[Requirement]:
    lines = (
        line.split("#", 1)[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines()
    )
    return [Requirement(line) for line in lines if line]


def test_the_lock_holds_every_direct_requirement_within_its_bounds() -> None:
    locked = pending.locked_versions(ROOT / "requirements" / "lock.txt")
    for file in ("direct.in", "unresolvable.in", "unresolvable-runtime.in"):
        for requirement in requirements(file):
            version = locked[pending.normalized(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} has {version}"


def test_the_sites_lock_holds_its_requirements() -> None:
    locked = pending.locked_versions(ROOT / "requirements" / "docs.lock.txt")
    assert {pending.normalized(requirement.name) for requirement in requirements("docs.in")} <= locked.keys()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_lies_within_the_ranges_of_the_package() -> None:
    locked = pending.locked_versions(ROOT / "requirements" / "lock.txt")
    declared = project()["project"]
    extras = declared["optional-dependencies"]
    for text in [*declared["dependencies"], *extras["ray"], *extras["megatron"], *extras["dev"]]:
        requirement = Requirement(text)
        version = locked.get(pending.normalized(requirement.name))
        if version is not None:  # Transformer Engine needs a GPU's toolchain, pre-commit is the user's choice
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} has {version}"


def test_every_folder_of_code_is_shipped() -> None:
    shipped = set(project()["tool"]["setuptools"]["packages"])
    folders = {
        "rlrefit." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("integration", "workers", "recipes")
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders <= shipped, f"pyproject.toml leaves out {sorted(folders - shipped)}"


def test_the_version_is_that_of_the_changelogs_first_heading() -> None:
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "package" / "__init__.py").read_text(), re.MULTILINE
    )
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_the_description_on_a_package_index_has_no_relative_links() -> None:
    text = (ROOT / project()["project"]["readme"]).read_text()
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", text))


def test_every_part_of_the_package_says_that_it_is_typed() -> None:
    shipped = project()["tool"]["setuptools"]["package-data"]
    for top in ("integration", "workers", "recipes"):
        assert "py.typed" in shipped[f"rlrefit.{top}"]
        assert (ROOT / top / "py.typed").is_file()
