"""The custom weight loader by which rlrefit runs in SGLang's tensor-parallel workers.

Start SGLang with ``custom_weight_loader=[LOADER]``. SGLang calls such a loader as ``loader(model, named_tensors)`` in
every worker, for an ``update_weights_from_tensor`` whose ``load_format`` is its name. It drops what the loader returns, and an
exception of the loader ends the scheduler. So the first such call only replaces the worker's own
``update_weights_from_tensor``, which has access to the whole updater and whose message reaches the caller. From then on, a call
with that ``load_format`` carries a command, or a bucket that SGLang's own loader can't write; all other calls are SGLang's own.
The scheduler reports its state (:mod:`.engine_state`) from then on, too.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

LOADER = "rlrefit.workers.engines.sglang.loader.load"
_MARK = "_serves_rlrefit"


def load(model: Any, named_tensors: Any) -> None:
    """Called by SGLang once in each worker; it loads nothing."""
    from .compat import differences
    from .engine_state import report_state

    problem = differences()
    try:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        original = WeightUpdater.update_weights_from_tensor
    except (ImportError, AttributeError):
        # There is nothing to answer with: the driver gets SGLang's own message in place of the workers' answers.
        logger.exception(problem)
        return
    if not hasattr(original, _MARK):
        if problem:
            WeightUpdater.update_weights_from_tensor = refusing(original, problem)
            return
        report_state()
        WeightUpdater.update_weights_from_tensor = serving(original)


def serving(original: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
    """``WeightUpdater.update_weights_from_tensor`` that also serves commands."""

    @functools.wraps(original)
    def update_weights_from_tensor(
        self: Any, named_tensors: Any, load_format: str | None = None
    ) -> tuple[bool, str]:
        if load_format != LOADER:
            return original(self, named_tensors, load_format)
        if not named_tensors:
            return True, json.dumps(
                []
            )  # from another driver, which does not know that this worker serves already
        from .worker_refit import serve

        if isinstance(named_tensors, dict):  # a flattened bucket, which SGLang's own loader could not write
            return True, json.dumps(serve(self, "load", [named_tensors]))
        [(method, arguments)] = named_tensors
        return True, json.dumps(serve(self, method, json.loads(arguments)))

    setattr(update_weights_from_tensor, _MARK, True)
    return update_weights_from_tensor


def refusing(original: Callable[..., tuple[bool, str]], problem: str) -> Callable[..., tuple[bool, str]]:
    """``WeightUpdater.update_weights_from_tensor`` of an SGLang that can't be refitted: it answers the driver with the reason."""

    @functools.wraps(original)
    def update_weights_from_tensor(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        if any(isinstance(value, str) and value == LOADER for value in (*args, *kwargs.values())):
            return False, problem
        return original(self, *args, **kwargs)

    setattr(update_weights_from_tensor, _MARK, True)
    return update_weights_from_tensor
