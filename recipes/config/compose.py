"""From a recipe's name and ``key=value`` overrides to one raw tree, with Hydra's files and grammar.

Hydra stops at the first override that it cannot apply. Here it only composes the files (and selects the
user's own config groups). Values are parsed with its grammar and applied one by one, so that one error lists
everything that is wrong.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..configs import BUNDLED, bundled_recipes
from .errors import ConfigError, Violation


@dataclass
class Composed:
    """A recipe before it is held against the schema.

    Attributes:
        tree: nested values with their interpolations unresolved.
        origins: where a dotted key got its value: ``file:line`` or the override.
        given: dotted keys that an override gives.
        violations: of the files and the overrides' grammar.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    violations: list[Violation] = field(default_factory=list)


def _recipe_file(recipe: str) -> Path:
    """The YAML file of a bundled recipe's name or of a path.

    Raises:
        ConfigError: neither a bundled recipe nor a file with the suffix ``.yaml``.
    """
    if recipe in bundled_recipes():
        return BUNDLED / f"{recipe}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file() and path.suffix == ".yaml":
        return path.resolve()
    known = ", ".join(bundled_recipes())
    if path.is_file():
        problem = f"{recipe} does not end in .yaml, the only suffix that Hydra composes; rename the file"
    elif path.suffix or path.parent != Path():
        problem = f"there is no file {path.resolve()}; give an existing YAML file or one of {known}"
    else:
        close = difflib.get_close_matches(recipe, bundled_recipes(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        problem = f"no bundled recipe is called {recipe}. {hint.capitalize()}The bundled ones are {known}; a file needs its .yaml"
    raise ConfigError(recipe, [problem])


def compose_recipe(recipe: str, overrides: Sequence[str]) -> Composed:
    """Composes the recipe's file with Hydra and applies the overrides.

    Args:
        recipe: name of a bundled recipe, or path of a YAML file whose ``defaults`` may name bundled ones.
        overrides: ``key=value`` in Hydra's grammar; ``group=option`` selects from config groups beside the
            file, and from the bundled one, ``trainer``.

    Raises:
        ConfigError: there is no such recipe. All else that is wrong is in the result's ``violations``.
    """
    file = _recipe_file(recipe)
    composed = Composed()
    with _hydra_in(file.parent):
        values, selections = _parse(overrides, composed.violations)
        config = _compose_files(file, selections, composed.violations)
    composed.origins.update(_line_origins(file, BUNDLED))
    composed.origins.update(_origins_of(selections))
    for override in values:
        _apply(override, config, composed)
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)  # _compose_files returns a mapping
    composed.tree.update((str(key), value) for key, value in tree.items())
    return composed


@contextmanager
def _hydra_in(folder: Path) -> Iterator[None]:
    """Hydra with ``folder`` as its configuration; that of an application around this one is put back."""
    outer = Singleton.get_state() if GlobalHydra.instance().is_initialized() else None
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), job_name="rlrefit", version_base="1.3"):
            yield
    finally:
        if outer is not None:
            Singleton.set_state(outer)


def _parse(overrides: Sequence[str], violations: list[Violation]) -> tuple[list[Override], list[Override]]:
    """Splits overrides into values to apply and group selections for Hydra."""
    parser = OverridesParser.create()
    values, selections = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split())
            remedy = "write key=value and quote special characters, e.g. 'name=\"a=b\"'"
            violations.append(
                Violation((), f"override {text!r} is not in Hydra's grammar ({reason}); {remedy}")
            )
            continue
        key = override.key_or_group
        problem = _unusable(override)
        if not key:
            violations.append(Violation((), f"override {text!r} names no key; write key=value"))
        elif problem:
            violations.append(Violation((key,), f"{key}: override {text!r} {problem}"))
        elif not (options := _group_options(key)) or not isinstance(override.value(), str):
            values.append(override)
        elif (choice := override.value()) in options:
            selections.append(override)
        else:
            problem = f"{choice!r} is not one of {', '.join(options)}; choose one"
            violations.append(Violation((key,), f"{key}: {problem} [override {text!r}]"))
    return values, selections


def _group_options(key: str) -> list[str]:
    """What a config group offers, beside the file or bundled; empty if there is no such group."""
    found = GlobalHydra.instance().config_loader().get_group_options(key)
    bundled = (path.stem for path in (BUNDLED / key).glob("*.yaml")) if key.isidentifier() else ()
    return sorted({*found, *bundled})


def _unusable(override: Override) -> str:
    """Why an override that the grammar allows has no meaning here; empty if it has one."""
    if override.is_hydra_override():
        return "configures Hydra, which only composes the files here and starts no job; leave it out"
    if override.is_sweep_override():
        return "is a sweep, and one run takes one value; start a run for each, or quote the value if it is a string"
    if override.is_delete():
        return "deletes a key; every key has a default, so give the value that you want, null for none"
    if override.package is not None or "/" in override.key_or_group:
        return "selects from a config group that is not there; values are written section.key=value"
    return ""


def _compose_files(file: Path, selections: list[Override], violations: list[Violation]) -> DictConfig:
    """The composed files as an open mapping; empty, with a violation, if they cannot be composed."""
    # Files of the package don't change, and Hydra takes a tenth of a second for them; those of a user may.
    composed = _composed_once if file.parent == BUNDLED else _composed
    try:
        config = deepcopy(composed(file, tuple((s.key_or_group, _plain(s)) for s in selections)))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = f"{file}{line}: not YAML: {error.problem}; correct the file"
    except RecursionError:
        reason = (
            f"{file}: its defaults lead back to itself; name the file unlike the recipe that it builds on"
        )
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        reason = f"{file}: Hydra cannot compose it: {' '.join(f'{error}{cause}'.split())}"
    else:
        OmegaConf.set_struct(config, False)
        return config
    violations.append(Violation((), reason))
    return OmegaConf.create({})


def _composed(file: Path, selections: tuple[tuple[str, str], ...]) -> DictConfig:
    """The composed files, with options of groups: each group, and the override that selects from it."""
    # The user's own search path comes first; an override of it would otherwise replace it.
    own = OmegaConf.select(OmegaConf.load(file), "hydra.searchpath", default=None) or []
    path = f"hydra.searchpath={json.dumps([*own, f'file://{BUNDLED}'])}"
    chosen = _groups_of(file, path) if selections else set()
    # A group that the files do not choose from comes after them, so that it changes what they say.
    selected = (f"{'' if group in chosen else '+'}{override}" for group, override in selections)
    return compose(config_name=file.stem, overrides=[path, *selected])


_composed_once = cache(_composed)


def _groups_of(file: Path, searchpath: str) -> set[str]:
    """The config groups that a recipe's defaults choose from."""
    defaults = (
        GlobalHydra.instance().config_loader().compute_defaults_list(file.stem, [searchpath], RunMode.RUN)
    )
    return {entry.config_path.rpartition("/")[0] for entry in defaults.defaults if entry.config_path}


def _plain(selection: Override) -> str:
    return str(selection.input_line).lstrip("+")


def _origins_of(selections: Sequence[Override]) -> dict[str, str]:
    """The override by each key of a bundled group's file that it brings in."""
    origins = {}
    for selection in selections:
        file = BUNDLED / selection.key_or_group / f"{selection.value()}.yaml"
        keys = _line_origins(file, BUNDLED) if file.is_file() else {}
        place = f"override {selection.input_line!r}"
        origins.update({f"{selection.key_or_group}.{key}": place for key in keys})
    return origins


def _apply(override: Override, config: DictConfig, composed: Composed) -> None:
    key = override.key_or_group
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        text = f"{key}: override {override.input_line!r} cannot be applied ({reason}); give the whole value"
        composed.violations.append(Violation((key,), text))
    else:
        place = f"override {override.input_line!r}"
        keys = [*_keys_of(key, override.value())]
        composed.origins.update(dict.fromkeys(keys, place))
        composed.given.update(keys)


def _keys_of(key: str, value: Any) -> Iterator[str]:
    yield key
    if isinstance(value, Mapping):
        for inner, inner_value in value.items():
            yield from _keys_of(f"{key}.{inner}", inner_value)


SELF = ("_self_", "")


def _line_origins(file: Path, bundled: Path) -> dict[str, str]:
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
