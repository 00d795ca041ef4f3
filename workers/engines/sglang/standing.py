"""Which memory an SGLang engine has released, and whether it is paused: what its scheduler itself goes by.

SGLang 0.5.17 tells neither. Its scheduler keeps both, whoever asked for them and however long ago, so that nothing is recorded
here: :func:`tell_standing` has the scheduler tell them with its internal state, for which no running request is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....integration.colocated.stages import KV_CACHE, WEIGHTS
from ....integration.errors import RefitError

# Under which the internal state has it.
STANDING = "rlrefit_standing"
# SGLang's tags of the memory that a stage's tag stands for; what there is besides wakes with the KV cache.
PARTS = {WEIGHTS: frozenset({WEIGHTS}), KV_CACHE: frozenset({KV_CACHE, "cuda_graph"})}
_MARK = "_tells_rlrefit"


@dataclass(frozen=True)
class Standing:
    """What an engine does not run for.

    Attributes:
        released: SGLang's tags of the memory that is released.
        paused: whether requests wait until somebody has it continue.
    """

    released: frozenset[str]
    paused: bool

    @staticmethod
    def told(internal_state: Mapping[str, Any], is_pause: bool) -> Standing:
        """As the scheduler tells it; ``is_pause`` is of the process that takes requests, which keeps an abort to itself.

        Raises:
            RefitError: the scheduler tells nothing.
        """
        found = internal_state.get(STANDING)
        if found is None:
            raise RefitError(
                "SGLang's scheduler does not tell what of its memory is released: rlrefit's loader did not reach it; the "
                "engine's log says why. Nothing was written; start the engine anew",
                stage="settings",
            )
        return Standing(frozenset(found["released"]), bool(found["paused"]) or is_pause)

    @property
    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` are not there as a whole."""
        return frozenset(tag for tag, parts in PARTS.items() if parts & self.released)


def standing_of(scheduler: Any) -> dict[str, Any]:
    """What :meth:`Standing.told` reads, as plain data."""
    return {
        "released": sorted(scheduler.weight_updater.offload_tags),
        "paused": bool(scheduler._engine_paused),
    }


def tell_standing() -> None:
    """Have the scheduler of this process tell it from its next round on; safe to call again.

    A worker holds nothing of its scheduler, and the scheduler has bound its answers before any worker could replace them. But
    it looks up the method that takes a round's requests each time.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.process_input_requests
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def process_input_requests(self: Any, recv_reqs: Any) -> Any:
        _add_to_internal_state(self)
        return original(self, recv_reqs)

    setattr(process_input_requests, _MARK, True)
    Scheduler.process_input_requests = process_input_requests


def _add_to_internal_state(scheduler: Any) -> None:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    answers = scheduler._request_dispatcher._mapping
    original = answers[GetInternalStateReq]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def get_internal_state(recv_req: Any) -> Any:
        output = original(recv_req)
        output.internal_state[STANDING] = standing_of(scheduler)
        return output

    setattr(get_internal_state, _MARK, True)
    answers[GetInternalStateReq] = get_internal_state
