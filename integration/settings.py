"""Settings as people write them, in a recipe or in some trainer's own section: read and checked as a whole, and what is told
of a key that is not there or of a value of the wrong type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from .config import RefitConfig
from .errors import RefitMismatch

REFIT_KEYS = tuple(f.name for f in fields(RefitConfig))
# Types that settings may have, in words.
_WANTED: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    int | None: "a whole number or null",
    float | None: "a number or null",
    str | None: "a string or null",
    list[str]: "a list of strings",
    dict[str, str]: "a mapping of strings to strings",
    dict[str, Any]: "a mapping with string keys",
}


@dataclass(frozen=True)
class Settings:
    """What a section holds.

    Attributes:
        refit: with the default for each value that was not given or is of a wrong type.
        own: the caller's own keys, where they were given and are of the right type.
        wrong: all that is wrong, a sentence each.
    """

    refit: RefitConfig
    own: Mapping[str, Any]
    wrong: tuple[str, ...]


def read_settings(
    given: Any,
    prefix: str,
    *,
    keys: Collection[str] = REFIT_KEYS,
    own: Mapping[str, Any] = MappingProxyType({}),
    others: Collection[str] = (),
) -> Settings:
    """Read a section that holds fields of :class:`RefitConfig`, or some of them.

    Args:
        given: the section, as read from a file; nothing in it is trusted. None is an empty one.
        prefix: of the section, as it stands before its keys in messages.
        keys: fields of :class:`RefitConfig` that this section may have.
        own: types of further keys that the caller asks for, by name: bool, int, float or str, or one of them or None.
        others: further keys that somebody else reads; they may stand there and are not looked at.

    Returns:
        The settings, and all that is wrong with them.
    """
    if given is not None and not isinstance(given, Mapping):
        return Settings(RefitConfig(), {}, (not_a_section(prefix, given),))
    hints = get_type_hints(RefitConfig)
    types = {**{key: hints[key] for key in keys}, **own}
    known = [*types, *others]
    good, wrong = {}, []
    for key, value in (given or {}).items():
        if key not in known:
            wrong.append(unknown_key(prefix, str(key), known))
        elif key not in types:
            continue
        elif _is(value, types[key]):
            good[key] = value
        else:
            wrong.append(wrong_type(f"{prefix}.{key}", value, types[key]))
    refit = RefitConfig.unchecked(**{key: value for key, value in good.items() if key in keys})
    return Settings(
        refit, {key: good[key] for key in own if key in good}, (*wrong, *refit.violations(prefix))
    )


def require_equal_settings(
    told: Sequence[Mapping[str, object]],
    describe: Callable[[int], str],
    *,
    remedy: str,
    stage: str,
    rank: int = -1,
) -> None:
    """Compare what the ranks were set up with: what differs would show as a hang or a puzzling digest later.

    Args:
        told: each rank's values by name.
        describe: names the rank that told the values at a place of ``told``.
        remedy: what to do if they differ.
        stage: of the error.
        rank: that reports.

    Raises:
        RefitMismatch: names the first setting that differs as its ``parameter``, and each rank's value.
    """
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        values = [theirs.get(name) for theirs in told]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{describe(place)}: {value!r}" for place, value in enumerate(values))
            raise RefitMismatch(
                f"the ranks were called with different values of {name}: {listed}. Nothing was written. {remedy}",
                stage=stage,
                rank=rank,
                parameter=name,
            )


def unknown_key(prefix: str, key: str, known: Collection[str], elsewhere: Sequence[str] = ()) -> str:
    """What is told of a key that is not there: the one that may have been meant, or those that there are.

    Args:
        prefix: of the section; empty for the outermost one.
        key: as it was given.
        known: keys of the section.
        elsewhere: dotted keys of other sections that may have been meant, if none of this one is near.
    """
    within = f"{prefix}." if prefix else ""
    meant = [within + near for near in get_close_matches(key, known, n=1, cutoff=0.7)] or elsewhere
    if meant:
        remedy = f"did you mean {' or '.join(meant)}?"
    else:
        remedy = f"the keys{f' of {prefix}' if prefix else ''} are {', '.join(known)}"
    return f"{within}{key}: there is no such key; {remedy}"


def wrong_type(path: str, value: Any, wanted: Any) -> str:
    """What is told of a value whose key wants another type; ``wanted`` is one of the schema's types."""
    return f"{path}: {_shown(value)} is not {_WANTED[wanted]}; give one"


def not_a_section(path: str, value: Any) -> str:
    """What is told of a value in the place of a whole section."""
    return f"{path}: {_shown(value)} stands for a whole section; give its keys, {path}.KEY"


def check_nccl_xfer_refit_support(policy: Mapping[str, Any]) -> None:
    """Check a trainer's ``policy`` section before anything is started.

    Args:
        policy: with ``nccl_xfer_refit`` and ``refit``; what else it has is not looked at. Without ``nccl_xfer_refit``, or
            with false, the conventional path serves, by the same settings.

    Raises:
        ValueError: lists every violation, a line each.
    """
    wrong = []
    turned_on = policy.get("nccl_xfer_refit", False)
    if not isinstance(turned_on, bool):
        wrong.append(wrong_type("policy.nccl_xfer_refit", turned_on, bool))
    refit = policy.get("refit")
    if isinstance(refit, RefitConfig):
        wrong += refit.violations()
    else:
        wrong += read_settings(refit, "policy.refit").wrong
    if wrong:
        raise ValueError("the refit can't be set up:\n  " + "\n  ".join(wrong))


def _is(value: Any, wanted: Any) -> bool:
    # By the type itself: to isinstance() true is a whole number.
    kinds = get_args(wanted) or (wanted,)
    return type(value) in kinds or (float in kinds and type(value) is int)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
