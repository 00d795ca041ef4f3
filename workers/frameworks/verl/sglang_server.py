"""verl's SGLang server of a replica, refitted by the first of the replica's rollout workers, or by the manager for shared GPUs.

actor_rollout_ref.rollout.engine_kwargs.sglang:
  custom_weight_loader: [rlrefit.workers.engines.sglang.loader.load]

SGLang's workers take orders over the server's own HTTP endpoints, and so nothing of verl's hand-over is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from ....integration.config import RefitConfig
from ....integration.control.address import joined
from ....integration.errors import RefitError, RefitTimeout
from ....integration.records.files import write_record
from ....integration.records.record import RefitRecord
from ...engines.sglang.callers import Answer, HttpCaller, Step
from ...engines.sglang.compat import differences
from ...engines.sglang.driver import SglangRefit
from ...engines.sglang.engine_state import STATE, EngineState
from .contract import require_supported_server
from .orders import Order
from .served import refuse

require_supported_server(SGLangHttpServer, ServerAdapter)

logger = logging.getLogger(__name__)

_MARK = "_sleeps_and_wakes_once"


class VerlServerCaller(HttpCaller):
    """Calls a server that verl may have paused: then verl also resumes it, once all replicas are updated.

    Args:
        url: of the server.
        timeout_s: of each step.

    Attributes:
        held: whether verl has paused it. verl pauses with ``abort``, of which SGLang's scheduler does not hear.
    """

    held = False

    def call(self, step: Step) -> Answer:
        """As :meth:`HttpCaller.call`."""
        if self.held and step.name == "continue_generation":
            return Answer()
        answer = super().call(step)
        if self.held and step.name == "state":
            return replace(answer, value=replace(answer.value, paused=True))
        return answer


class SglangServer:
    """The server of one replica.

    Args:
        handle: Ray's, of verl's server.
        replica_rank: verl's.
    """

    def __init__(self, handle: Any, replica_rank: int) -> None:
        self._handle, self._replica_rank = handle, replica_rank
        self._opened: tuple[VerlServerCaller, SglangRefit] | None = None

    def refit(self, order: Order) -> None:
        """Have all workers of the server meet the actors, if ``order`` says so, and receive the weights.

        Args:
            order: to the first of these workers; the others' ranks count on from its.

        Raises:
            RefitError: of the worker's kind, or of what hindered the server; the other ranks have heard of it. The server stays
                paused.
        """
        config = RefitConfig(**order.config)
        try:
            if order.meeting is not None:
                self._meet(order, config)
            assert self._opened is not None, "an epoch that is open was joined"
            driver = self._driver(self._opened, config)
            records = driver.refit(order.version)
        except RefitError as error:
            self._leave(error)
            raise
        if order.records_dir is not None:
            for record in records:
                write_record(order.records_dir, RefitRecord(**record), order.train_ranks)

    def wake(self, tag: str, config: RefitConfig) -> None:
        """Have the memory behind a tag, ``weights`` or ``kv_cache``, if it sleeps.

        Raises:
            RefitError: the server can't be reached, or can't be refitted.
        """
        if self._opened is None:
            self._opened = self._open(config)
        driver = self._driver(self._opened, config)
        if tag in driver.asleep():
            driver.wake([tag])

    def _meet(self, order: Order, config: RefitConfig) -> None:
        # An earlier driver may be of a server that has been restarted.
        self._opened = None
        try:
            _, driver = self._opened = self._open(config)
        except RefitError as error:
            refuse(order, [str(error)])
        assert order.meeting is not None
        driver.join_refit(order.meeting, order.rank, config)

    def _driver(self, opened: tuple[VerlServerCaller, SglangRefit], config: RefitConfig) -> SglangRefit:
        """Which knows whether verl has paused the server by now."""
        caller, driver = opened
        caller.held = False
        paused = self._ask(config)[1]
        # The driver's own pauses reach SGLang's scheduler, and verl's does not.
        caller.held = paused and not driver.calls.state().paused
        return driver

    def _open(self, config: RefitConfig) -> tuple[VerlServerCaller, SglangRefit]:
        if problem := differences():
            raise RefitError(problem, stage="settings")
        caller = VerlServerCaller(self._ask(config)[0], timeout_s=config.call_limit_s)
        return caller, SglangRefit(caller, config.timeout_s)

    def _ask(self, config: RefitConfig) -> tuple[str, bool]:
        try:
            found: tuple[str, bool] = ray.get(
                self._handle.__ray_call__.remote(_address), timeout=config.timeout_s
            )
        except ray.exceptions.GetTimeoutError as error:
            raise RefitTimeout(
                f"verl's SGLang server of replica {self._replica_rank} did not say within {config.timeout_s:.0f} s where it "
                "is. Nothing was written in this update; see what that process does (py-spy dump)",
                stage="handshake",
            ) from error
        except ray.exceptions.RayError as error:
            raise RefitError(
                f"verl's SGLang server of replica {self._replica_rank} did not say where it is: {error}. Nothing was "
                "written in this update; remove the replica, or restart it",
                stage="handshake",
            ) from error
        return found

    def _leave(self, error: RefitError) -> None:
        """Have the workers leave the epoch, in which the actors may wait for them still."""
        if self._opened is None or isinstance(error, RefitTimeout):
            return
        _, driver = self._opened
        try:
            driver.close_refit()
        except RefitError as second:
            error.add_note(f"SGLang's workers did not all leave the epoch: {second}")


def _address(server: Any) -> tuple[str, bool]:
    """Called by Ray in the process of verl's server, which is made fit: its URL, and whether new requests wait in it."""
    from sglang.srt.entrypoints import http_server

    manager = server.tokenizer_manager
    if not hasattr(manager, _MARK):
        setattr(manager, _MARK, True)
        for method in ("release_memory_occupation", "resume_memory_occupation"):
            setattr(manager, method, _once(manager, getattr(manager, method), method))

    state = http_server._global_state
    if not isinstance(state.scheduler_info, Mapping):
        # verl takes the third of what SGLang's start returns for what SGLang's schedulers told. From 0.5.10 on those are the
        # ports, on which /server_info, the way to the settings and the state of an engine, fails.
        state.scheduler_info = {}
    host, port = server.get_server_address()
    return f"http://{joined(host, port)}", bool(manager.is_pause)


def _once(manager: Any, original: Callable[..., Any], method: str) -> Callable[..., Any]:
    """A method of SGLang's tokenizer manager by which no memory is released that sleeps, and none resumed that is awake.

    SGLang's scheduler ends at either. verl asks for it in the update after one that failed, which has left the KV cache asleep.
    """

    @functools.wraps(original)
    async def call(obj: Any, request: Any = None) -> Any:
        internal, *_ = await manager.get_internal_state()
        if STATE in internal and obj.tags:
            released = EngineState.from_internal(internal, is_pause=False).released
            resumes = method == "resume_memory_occupation"
            tags = [tag for tag in obj.tags if (tag in released) == resumes]
            if not tags:
                return None
            obj = type(obj)(tags=tags)
        return await original(obj, request)

    return call
