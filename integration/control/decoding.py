"""Dataclasses from plain data that another rank sent: every type is checked, and what is wrong is named by its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from ..errors import RefitMismatch
from .frames import Malformed


def decode[T](kind: type[T], data: object, path: str = "") -> T:
    """Make a value of ``kind`` from JSON data, which nothing is trusted of.

    Args:
        kind: a dataclass; or ``bool``, ``int``, ``float``, ``str``, ``bytes`` (hex digits), ``list[X]``, ``tuple[X, ...]``,
            ``tuple[X, Y]``, ``dict[str, X]`` or ``dict[int, X]`` (decimal keys), or a union of some of these and None. A
            dataclass is an object with its fields as keys; fields with a default may be left out. ``object`` is anything,
            for the caller to decode.
        data: as :func:`json.loads` gave it.
        path: of the value, as errors name it.

    Raises:
        Malformed: a value has another type, or a field is missing or unknown; says which field.
    """
    return cast(T, _decode(kind, data, path))


def decode_from[T](kind: type[T], data: object, peer: int, who: str, what: str, *, stage: str) -> T:
    """As :func:`decode`, of what another rank told.

    Args:
        kind: as :func:`decode`.
        data: as it came.
        peer: refit rank that told it.
        who: that rank, as errors name it.
        what: it describes.
        stage: for errors.

    Raises:
        RefitMismatch: the data is malformed; names the rank and the field.
    """
    try:
        return decode(kind, data)
    except Malformed as error:
        raise RefitMismatch(
            f"{who} describes {what} in a form that can't be read: {error}. Nothing was written; do all ranks run the same "
            "rlrefit?",
            stage=stage,
            blamed=peer,
        ) from error


def _decode(kind: Any, data: object, path: str) -> Any:
    if kind in (bool, int, str):
        # By the type itself: to isinstance() true is a whole number.
        return data if type(data) is kind else _refuse(kind.__name__, data, path)
    if kind is float:
        return float(data) if _is_number(data) else _refuse("a finite number", data, path)  # type: ignore[arg-type]
    if kind is bytes:
        return _bytes(data, path)
    if kind is object:
        return data
    origin = get_origin(kind)
    if origin is UnionType:
        return _one_of(get_args(kind), data, path)
    if origin in (list, tuple):
        return _sequence(origin, get_args(kind), data, path)
    if origin in (dict, Mapping):
        key_kind, value_kind = get_args(kind)
        return _mapping(key_kind, value_kind, data, path)
    if is_dataclass(kind):
        return _dataclass(cast(type, kind), data, path)
    raise TypeError(f"{kind!r} can't be decoded")


def _is_number(data: object) -> bool:
    return type(data) is int or (type(data) is float and isfinite(data))


def _bytes(data: object, path: str) -> bytes:
    if not isinstance(data, str):
        _refuse("hex digits", data, path)
    try:
        return bytes.fromhex(cast(str, data))
    except ValueError:
        return cast(bytes, _refuse("hex digits", data, path))


def _one_of(kinds: Sequence[Any], data: object, path: str) -> Any:
    if data is None and NoneType in kinds:
        return None
    refused: Malformed | None = None
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _decode(kind, data, path)
            except Malformed as error:
                refused = refused or error
    raise refused or Malformed(f"{path or 'it'} is not null")


def _sequence(origin: Any, kinds: tuple[Any, ...], data: object, path: str) -> Any:
    if not isinstance(data, list):
        _refuse("a list", data, path)
    values = cast(list[object], data)
    if origin is tuple and kinds[-1:] != (...,):
        if len(values) != len(kinds):
            raise Malformed(f"{path or 'it'} has {len(values)} entries instead of {len(kinds)}")
        return tuple(
            _decode(kind, value, f"{path}[{i}]")
            for i, (kind, value) in enumerate(zip(kinds, values, strict=True))
        )
    kind = kinds[0]
    if kind in (int, str, bool) and all(type(value) is kind for value in values):
        return origin(values)  # thousands of numbers at a time
    return origin(_decode(kind, value, f"{path}[{i}]") for i, value in enumerate(values))


def _mapping(key_kind: Any, kind: Any, data: object, path: str) -> dict[Any, Any]:
    if not isinstance(data, dict):
        _refuse("an object", data, path)
    found = {}
    for key, value in cast(dict[str, object], data).items():
        if key_kind is int and not (key.isascii() and key.isdecimal()):
            raise Malformed(f"{path or 'it'} has the key {key!r}, which is no number")
        found[key_kind(key)] = _decode(kind, value, f"{path}[{key}]")
    return found


def _dataclass(kind: type, data: object, path: str) -> Any:
    if not isinstance(data, dict):
        _refuse("an object", data, path)
    given = cast(dict[str, object], data)
    kinds, needed = _fields_of(kind)
    wrong = sorted((needed - given.keys()) | (given.keys() - kinds.keys()))
    if wrong:
        raise Malformed(f"{path or kind.__name__} lacks or does not know {', '.join(wrong)}")
    dot = f"{path}." if path else ""
    try:
        return kind(**{name: _decode(kinds[name], value, dot + name) for name, value in given.items()})
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(f"{path or kind.__name__}: {error}") from error


@cache
def _fields_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """The fields' types, and the names of those that have no default."""
    hints = get_type_hints(kind)
    found = fields(cast(Any, kind))
    needed = {f.name for f in found if f.default is MISSING and f.default_factory is MISSING}
    return {f.name: hints[f.name] for f in found}, frozenset(needed)


def _refuse(wanted: str, data: object, path: str) -> object:
    shown = repr(data)
    raise Malformed(
        f"{path or 'it'} is {shown if len(shown) <= 40 else shown[:40] + '…'} instead of {wanted}"
    )
