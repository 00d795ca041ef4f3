"""The recipes that ship with the package: one YAML file each; those with a leading underscore are bases."""

from __future__ import annotations

from pathlib import Path

BUNDLED = Path(__file__).parent


def bundled_recipes() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(path.stem for path in BUNDLED.glob("*.yaml") if not path.name.startswith("_"))


def described_recipes() -> dict[str, str]:
    """Each bundled recipe's name with the first sentence of its file, which says what it trains."""
    return {name: _first_sentence(BUNDLED / f"{name}.yaml") for name in bundled_recipes()}


def _first_sentence(file: Path) -> str:
    return file.read_text().partition("\n")[0].removeprefix("# ").partition(". ")[0].rstrip(".")
