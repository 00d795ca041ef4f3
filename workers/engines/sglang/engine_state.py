"""Which memory an SGLang engine has released, and whether it is paused.

SGLang reports neither, but its scheduler keeps both, whoever asked for them. So nothing is recorded here:
:func:`report_state` makes the scheduler report them with its internal state, which does not wait for running requests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....integration.colocated.stages import KV_CACHE, WEIGHTS
from ....integration.errors import RefitError
from .drafters import know_drafter

# The key in the internal state.
STATE = "rlrefit_state"
# SGLang's tags of the memory behind each tag of a stage; CUDA graphs wake with the KV cache.
PARTS = {WEIGHTS: frozenset({WEIGHTS}), KV_CACHE: frozenset({KV_CACHE, "cuda_graph"})}
_MARK = "_reports_to_rlrefit"


@dataclass(frozen=True)
class EngineState:
    """Why an engine does not run requests.

    Attributes:
        released: SGLang's tags of the memory that is released.
        paused: whether requests wait until somebody resumes the engine.
    """

    released: frozenset[str]
    paused: bool

    @staticmethod
    def from_internal(internal_state: Mapping[str, Any], is_pause: bool) -> EngineState:
        """Read what the scheduler reports.

        Args:
            internal_state: of the scheduler.
            is_pause: of the process that takes requests; the scheduler does not know of a pause by ``abort``.

        Raises:
            RefitError: the scheduler does not report it.
        """
        found = internal_state.get(STATE)
        if found is None:
            raise RefitError(
                "SGLang's scheduler does not report its released memory. Nothing was written. If the engine was restarted, make a "
                "new driver of it and have both sides meet again; else rlrefit's loader did not reach it, and its log says why",
                stage="settings",
            )
        return EngineState(frozenset(found["released"]), bool(found["paused"]) or is_pause)

    @property
    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` are released, at least in part."""
        return frozenset(tag for tag, parts in PARTS.items() if parts & self.released)


def state_of(scheduler: Any) -> dict[str, Any]:
    """What :meth:`EngineState.from_internal` reads, as plain data."""
    return {
        "released": sorted(scheduler.weight_updater.offload_tags),
        "paused": bool(scheduler._engine_paused),
    }


def report_state() -> None:
    """Make the scheduler of this process report its state, and its worker know its drafter, from its next round on; safe to call again.

    A worker has no reference to its scheduler, and the scheduler has bound its handlers before a worker could replace them. But
    it looks up the method that takes a round's requests each time.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.process_input_requests
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def process_input_requests(self: Any, recv_reqs: Any) -> Any:
        know_drafter(self)
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
        output.internal_state[STATE] = state_of(scheduler)
        return output

    setattr(get_internal_state, _MARK, True)
    answers[GetInternalStateReq] = get_internal_state
