"""Where in which YAML file a key of a composed recipe stands, for error texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

SELF = ("_self_", "")


def line_origins(file: Path, bundled: Path) -> dict[str, str]:
    """``file:line`` by dotted key, over a recipe and the files that its ``defaults`` name.

    Args:
        file: the recipe.
        bundled: folder that is searched after the recipe's own.

    A file that cannot be read or parsed has no lines; the composition reports it.
    """
    origins: dict[str, str] = {}
    _collect(file, "", bundled, origins, set())
    return origins


def _collect(file: Path, package: str, bundled: Path, origins: dict[str, str], seen: set[Path]) -> None:
    if file in seen or not file.is_file():
        return
    seen.add(file)
    try:
        root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return
    if not isinstance(root, yaml.MappingNode):
        return
    own = [(key, value) for key, value in root.value if key.value != "defaults"]
    defaults = [entry for key, value in root.value if key.value == "defaults" for entry in _defaults(value)]
    if SELF not in defaults:
        defaults.append(SELF)  # Hydra's order where it is not written: the file stands above its bases
    for entry in defaults:
        if entry == SELF:
            for key, value in own:
                _lines(key, value, package, str(file), origins)
            continue
        name, base_package = entry
        base = next(
            (f for f in (file.parent / f"{name}.yaml", bundled / f"{name}.yaml") if f.is_file()), None
        )
        if base is not None:
            _collect(base, base_package, bundled, origins, seen)


def _lines(key: yaml.Node, value: yaml.Node, prefix: str, file: str, origins: dict[str, str]) -> None:
    name = f"{prefix}.{key.value}" if prefix else str(key.value)
    origins[name] = f"{file}:{key.start_mark.line + 1}"
    if isinstance(value, yaml.MappingNode):
        for inner_key, inner_value in value.value:
            _lines(inner_key, inner_value, name, file, origins)


def _defaults(node: yaml.Node) -> Iterator[tuple[str, str]]:
    """Path without suffix, and package, of each entry of a defaults list."""
    if not isinstance(node, yaml.SequenceNode):
        return
    for entry in node.value:
        if isinstance(entry, yaml.ScalarNode):
            yield entry.value.lstrip("/"), ""
        elif isinstance(entry, yaml.MappingNode):
            for group, option in entry.value:
                folder = group.value.split()[-1].split("@")[0].lstrip("/")
                yield f"{folder}/{option.value}", folder.replace("/", ".")
