"""Which parameters a tensor may reach that could not be followed through a loader."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def may_be_reached(parameter: str, unknown: Iterable[str], *, strict: bool = False) -> bool:
    """Whether one of the tensors ``unknown`` may be written to ``parameter``.

    It reaches modules of its own block, by the first number in the names (``model.layers.3.…``); one without a number reaches
    all, or with ``strict`` none.
    """
    blocks = {_block(name) for name in unknown}
    if None in blocks and not strict:
        return True
    block = _block(parameter)
    return block is not None and block in blocks


def _block(name: str) -> str | None:
    found = _NUMBER.search(name)
    return found.group(1) if found else None
