"""Holds a raw tree against the schema: unknown keys, wrong types, unresolved values, all of them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...integration.config import RefitConfig, as_written, not_a_section, unknown_key, wrong_type
from .errors import Violation
from .schema import TrainConfig


def check_tree(tree: Mapping[str, Any]) -> tuple[TrainConfig, list[Violation]]:
    """Reads a raw tree into the schema.

    Args:
        tree: nested values; interpolations may be unresolved and may point at keys that only the schema has.

    Returns:
        The configuration, with the default in place of every value that was refused, and the violations.
    """
    filled = deepcopy(_unfilled())
    violations = [*_fill(tree, filled, TrainConfig, ""), *_resolve(filled), *_refit_violations(filled)]
    config = OmegaConf.to_object(filled)
    assert isinstance(config, TrainConfig)
    violations += [
        Violation((path,), f"{path}: {value} is not finite; give a number")
        for path, value in leaves(config)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    return config, violations


@cache
def _unfilled() -> DictConfig:
    """The schema with its defaults, which takes OmegaConf ten times as long to make as to copy."""
    unfilled: DictConfig = OmegaConf.structured(TrainConfig)
    return unfilled


def _fill(tree: Mapping[Any, Any], target: DictConfig, schema: type, prefix: str) -> Iterator[Violation]:
    types = get_type_hints(schema)
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if key not in types:
            yield Violation((path,), unknown_key(prefix, str(key), types, _elsewhere(str(key), path)))
        elif dataclasses.is_dataclass(types[key]):
            if isinstance(value, Mapping):
                yield from _fill(value, target[key], types[key], path)
            else:
                yield Violation((path,), not_a_section(path, value))
        elif not _assigned(
            target, key, as_written(key, value) if schema is RefitConfig else value, types[key]
        ):
            yield Violation((path,), wrong_type(path, value, types[key]))


def _assigned(target: DictConfig, key: str, value: Any, wanted: Any) -> bool:
    # OmegaConf takes any whole number for a bool, and a mapping merges with what was there.
    if wanted is bool and type(value) is int and value not in (0, 1):
        return False
    try:
        target[key] = value
    except OmegaConfBaseException:
        return False
    return True


def _resolve(filled: DictConfig) -> Iterator[Violation]:
    """Replaces interpolations that fail, and values that are still to be given, by the default."""
    for path, default in leaves(TrainConfig()):
        section, _, key = path.rpartition(".")
        node = OmegaConf.select(filled, section) if section else filled
        if OmegaConf.is_missing(node, key):
            problem = "is ???, a value that is still to be given; give one"
        else:
            try:
                value = node[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
                if not isinstance(default, list | dict) or not OmegaConf.is_interpolation(node, key):
                    continue
                # OmegaConf converts what an interpolation leads to for numbers and strings, and takes anything for lists and mappings.
                node[key] = value
                continue
            except OmegaConfBaseException as error:
                raw = OmegaConf.to_container(node, resolve=False)
                shown = raw[key] if isinstance(raw, dict) else raw
                problem = f"{shown!r} does not resolve ({str(error).splitlines()[0]}); give a value"
        node[key] = default
        yield Violation((path,), f"{path}: {problem}")


def _refit_violations(filled: DictConfig) -> Iterator[Violation]:
    """Replaces values of which no :class:`RefitConfig` can be made by the default."""
    section = filled.policy.refit
    given = RefitConfig.unchecked(**{str(key): section[key] for key in section})
    default = RefitConfig()
    for text in given.violations("policy.refit"):
        path = text.partition(":")[0]
        key = path.rpartition(".")[2]
        section[key] = getattr(default, key)
        yield Violation((path,), text)


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all that is no section."""
    for entry in dataclasses.fields(section):
        value = getattr(section, entry.name)
        path = f"{prefix}.{entry.name}" if prefix else entry.name
        if dataclasses.is_dataclass(value):
            yield from leaves(value, path)
        else:
            yield path, value


def _elsewhere(key: str, path: str) -> list[str]:
    """Keys of this name in any section, or else the one nearest to this path."""
    named = [name for name, _ in leaves(TrainConfig())]
    sections = {leaf[:dot] for leaf in named for dot, letter in enumerate(leaf) if letter == "."}
    every = [*named, *sorted(sections)]
    same = [name for name in every if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return same or difflib.get_close_matches(path, every, n=1, cutoff=0.75)
