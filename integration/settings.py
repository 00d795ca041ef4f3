"""Settings of a refit as some trainer's configuration gives them, checked as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from .config import RefitConfig

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def read_settings(
    given: Mapping[str, Any],
    prefix: str,
    *,
    also: Collection[str] = (),
    without: Collection[str] = (),
    **fixed: Any,
) -> tuple[RefitConfig, list[str]]:
    """Read fields of :class:`RefitConfig`.

    Args:
        given: by name, as read from a file; nothing in it is trusted.
        prefix: what stands before the names in messages.
        also: further names that the caller reads itself.
        without: fields that are not for this place.
        **fixed: fields that the caller gives.

    Returns:
        The settings, with the default for each value of a wrong type, and all that is wrong, a sentence each.
    """
    types = get_type_hints(RefitConfig)
    known = [f.name for f in fields(RefitConfig) if f.name not in without and f.name not in fixed]
    wrong = []
    good = dict(fixed)
    for name, value in given.items():
        if name in also:
            continue
        if name not in known:
            wrong.append(f"{prefix}.{name} is not known; there are {', '.join([*known, *also])}")
        elif type(value) is not types[name] and not (types[name] is float and type(value) is int):
            wrong.append(f"{prefix}.{name}: {value!r} is not {_WANTED[types[name]]}; give one")
        else:
            good[name] = value
    config = RefitConfig(**good)
    return config, wrong + config.violations(prefix)


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
        wrong.append(f"policy.nccl_xfer_refit: {turned_on!r} is not true or false; give one")
    refit = policy.get("refit") or {}
    if isinstance(refit, RefitConfig):
        wrong += refit.violations()
    elif isinstance(refit, Mapping):
        wrong += read_settings(refit, "policy.refit")[1]
    else:
        wrong.append(f"policy.refit: {refit!r} stands for a whole section; give its keys, policy.refit.KEY")
    if wrong:
        raise ValueError("the refit can't be set up:\n  " + "\n  ".join(wrong))
