"""How an SGLang engine is called: by its tokenizer manager in this process, or by its HTTP server.

A :class:`Step` is one of SGLang's own control requests. A caller does single steps; :class:`EngineCalls` adds commands to the
workers; the order of the steps of a refit is in :mod:`.driver`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....integration.errors import RefitError, RefitTimeout
from ..common.answers import raise_refit_errors
from ..common.http_calls import STAGE, HttpCalls
from .compat import STORES, TESTED, require_calls, stores_of, unsupported_settings, warn_of_untested
from .drafters import DRAFTER_SETTINGS, SESSION
from .engine_state import EngineState
from .loader import LOADER

# Step → (request structure of sglang.srt.managers.io_struct, whether its method also takes a web request). The step's name is
# the tokenizer manager's method and the server's path.
_REQUESTS: Mapping[str, tuple[str, bool]] = {
    "update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput", True),
    "release_memory_occupation": ("ReleaseMemoryOccupationReqInput", True),
    "resume_memory_occupation": ("ResumeMemoryOccupationReqInput", True),
    "pause_generation": ("PauseGenerationReqInput", False),
    "continue_generation": ("ContinueGenerationReqInput", False),
}
# Those around each update, where SGLang has them (from 0.5.21 on): SGLang refuses an update outside of a session.
_SESSIONS: Mapping[str, tuple[str, bool]] = {
    "begin_weight_update": ("BeginWeightUpdateReqInput", True),
    "end_weight_update": ("EndWeightUpdateReqInput", True),
}
# The settings of an engine that the driver reads.
SETTINGS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "device",
    "enable_eplb",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "custom_weight_loader",
    "weight_cache_mode",
    "disaggregation_mode",
    "disable_radix_cache",
    "enable_hierarchical_cache",
    *DRAFTER_SETTINGS,
    *STORES,
)


@dataclass(frozen=True)
class Step:
    """One request to an engine.

    Attributes:
        name: of :data:`_REQUESTS` or :data:`_SESSIONS`, or ``flush_cache``, ``settings``, ``state``, ``weight_version``,
            ``update_weight_version``.
        fields: of the request.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """SGLang's answer.

    Attributes:
        success: as SGLang says.
        message: its text.
        value: the answer to ``settings`` (:data:`SETTINGS`, SGLang's own ``version``, and ``has_sessions``: whether each update
            has to be in a session), ``state`` (a :class:`~.engine_state.EngineState`) and ``weight_version``.
    """

    success: bool = True
    message: str = ""
    value: Any = None


class Caller(Protocol):
    """Calls one engine."""

    def call(self, step: Step) -> Answer:
        """Do a step; return once SGLang has answered."""


class EngineCaller:
    """Calls an ``sglang.Engine`` of this process.

    Args:
        engine: the engine.
        loop: the running event loop in which the engine's asynchronous methods are awaited. Its own, which its synchronous
            methods run, if left out; SGLang ties an engine to the loop of its first request.
        timeout_s: of each step.
    """

    def __init__(
        self, engine: Any, loop: asyncio.AbstractEventLoop | None = None, timeout_s: float = 600.0
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._timeout_s = timeout_s

    def call(self, step: Step) -> Answer:
        """As :meth:`Caller.call`.

        Raises:
            RefitError: called in the engine's own loop, which would wait for itself.
            RefitTimeout: no answer.
        """
        inside = self._engine.loop.is_running() if self._loop is None else _running_loop() is self._loop
        if inside:
            raise RefitError(
                f"a blocking call ({step.name}) was made in the event loop that has to answer it, and would wait for itself. "
                "Nothing was asked; await AsyncSglangRefit's own calls there, or its run(call) with any other blocking one",
                stage="settings",
            )
        work = asyncio.wait_for(self._done(step), self._timeout_s)
        try:
            if self._loop is None:
                found: Answer = self._engine.loop.run_until_complete(work)
                return found
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TimeoutError as error:
            raise _late(step, self._timeout_s) from error

    async def _done(self, step: Step) -> Answer:
        manager = self._engine.tokenizer_manager
        if step.name == "settings":
            import sglang
            from sglang.srt.managers import io_struct

            has_sessions = hasattr(manager, "begin_weight_update")
            requests = {**_REQUESTS, **(_SESSIONS if has_sessions else {})}
            require_calls(sglang.__version__, manager, io_struct, {n: r[0] for n, r in requests.items()})
            # Not server_args, which do not change when SGLang attaches a store.
            settings = {name: manager.config_value(name) for name in SETTINGS}
            return Answer(value=settings | {"version": sglang.__version__, "has_sessions": has_sessions})
        if step.name == "state":
            [internal] = await manager.get_internal_state()
            return Answer(value=EngineState.from_internal(internal, manager.is_pause))
        if step.name == "weight_version":
            return Answer(value=manager.config_value("weight_version"))
        if step.name == "update_weight_version":
            # Of 0.5.23, whose schedulers tell it with each completion.
            if hasattr(manager, "update_weight_version"):
                from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

                await manager.update_weight_version(
                    UpdateWeightVersionReqInput(**step.fields, abort_all_requests=False)
                )
            else:
                manager.record_config_updates("rlrefit", weight_version=step.fields["new_version"])
            return Answer()
        if step.name == "flush_cache":
            flushed = await manager.flush_cache(**step.fields)
            return Answer(flushed.success, flushed.message)
        from sglang.srt.managers import io_struct

        structure, web = {**_REQUESTS, **_SESSIONS}[step.name]
        request = getattr(io_struct, structure)(**step.fields)
        # Pauses do not wait for an answer, so nothing else would start the loop that reads answers.
        manager.auto_create_handle_loop()
        result = await getattr(manager, step.name)(*((request, None) if web else (request,)))
        return Answer(*result[:2]) if isinstance(result, tuple) else Answer()


class HttpCaller:
    """Calls an SGLang server.

    Args:
        url: of the server, ``http://host:port``.
        api_key: its ``--admin-api-key`` or ``--api-key``, if it has one.
        timeout_s: of each step.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._http = HttpCalls(url, api_key, timeout_s)

    def call(self, step: Step) -> Answer:
        """As :meth:`Caller.call`.

        Raises:
            RefitError: the server can't be reached, or knows no such call.
            RefitTimeout: no answer.
        """
        if step.name == "settings":
            found = self._ask(step, "GET", "/server_info")
            missing = [name for name in (*SETTINGS, "version") if name not in found]
            if missing:
                raise RefitError(
                    f"the server at {self._http.url} does not report {', '.join(missing)}, so it is not an SGLang that rlrefit "
                    f"knows. Install {' or '.join(TESTED)}",
                    stage="settings",
                )
            # A path that takes POST alone; one that is not there would be 404.
            has_sessions = self._http.ask("GET", "/begin_weight_update", name=step.name).status == 405
            known = {name: found[name] for name in (*SETTINGS, "version")}
            return Answer(value=known | {"has_sessions": has_sessions})
        if step.name == "state":
            [internal] = self._ask(step, "GET", "/server_info")["internal_states"]
            # The server does not report its own pause.
            return Answer(value=EngineState.from_internal(internal, is_pause=False))
        if step.name == "weight_version":
            return Answer(value=self._ask(step, "GET", "/model_info")["weight_version"])
        if step.name == "flush_cache":
            seconds = step.fields.get("timeout_s") or 0.0
            return self._answered(self._ask(step, "POST", f"/flush_cache?timeout={seconds}"))
        fields = {name: _plain(value) for name, value in step.fields.items()}
        if step.name == "update_weight_version":
            # The default would abort the requests that continue with the new weights.
            fields["abort_all_requests"] = False
        return self._answered(self._ask(step, "POST", f"/{step.name}", fields))

    def _answered(self, found: dict[str, Any]) -> Answer:
        return Answer(bool(found.get("success", True)), str(found.get("message", "")))

    def _ask(
        self, step: Step, method: str, path: str, fields: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        answer = self._http.ask(method, path, fields, name=step.name)
        if answer.status == 400:  # how SGLang says success: false
            return {"message": answer.words, **answer.content, "success": False}
        if answer.status != 200:
            raise RefitError(
                f"the SGLang server at {self._http.url} answered {step.name} with {answer.status}: {answer.words}",
                stage=STAGE,
            )
        return answer.content


class EngineCalls:
    """Calls of one engine that was started with ``custom_weight_loader=[LOADER]``, and commands to its workers.

    Args:
        caller: the way to the engine.

    Attributes:
        settings: of the engine, as :data:`~.callers.SETTINGS`, when it was last asked.

    Raises:
        RefitError: the engine was started with settings that can't be refitted; all of them are named.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.settings: dict[str, Any] = caller.call(Step("settings")).value
        if problems := unsupported_settings(self.settings, LOADER):
            raise RefitError(
                f"SGLang was started with settings that rlrefit can't refit: {'; '.join(problems)}. Nothing was written; start "
                "it with other settings",
                stage="settings",
            )
        warn_of_untested(self.settings["version"])
        # Whether a session of this driver may be open.
        self._session = False

    def step(self, name: str, **fields: Any) -> Answer:
        """Do a step.

        Raises:
            RefitError: SGLang refused it.
        """
        return _accepted(name, self._caller.call(Step(name, fields)))

    def update(self, payloads: list[str], load_format: str = LOADER) -> Answer:
        """One request of SGLang's ``update_weights_from_tensor``; caches are flushed by another step."""
        nothing = [_pickled([])] * self.settings["tp_size"]
        name = "update_weights_from_tensor"
        fields = {
            "serialized_named_tensors": payloads or nothing,
            "load_format": load_format,
            "flush_cache": False,
        }
        if not self.settings["has_sessions"]:
            return self.step(name, **fields, disable_draft_model=True)
        with self._in_session():
            answer = self._caller.call(Step(name, fields | {"selector": "target"}))
        return _accepted(name, answer)

    @contextmanager
    def _in_session(self) -> Iterator[None]:
        """A session in which SGLang takes updates. What raises leaves it open, and the next one ends it first.

        Raises:
            RefitError: another caller's is open.
        """
        if self._session:
            self._caller.call(Step("end_weight_update", {"rid": SESSION}))
        self._session = True
        # SGLang unpacks and processes all weights of the models that a session is for, even those of released memory. Workers
        # see to both themselves, so the session is for drafters, of which the scheduler lets it see none (drafters.know_drafter).
        begun = self._caller.call(Step("begin_weight_update", {"selector": "draft", "rid": SESSION}))
        self._session = begun.success
        if not begun.success:
            raise RefitError(
                f"SGLang refused begin_weight_update: {begun.message}. Nothing was asked of the workers; let the caller that began "
                "it end it, or end it by SGLang's end_weight_update, and try again",
                stage="transfer",
            )
        yield
        self.step("end_weight_update", rid=SESSION)
        self._session = False

    def extend(self, loader: str) -> None:
        """Have all workers call another of the engine's ``custom_weight_loader``, which adds commands (``also_serve``)."""
        self.update([], loader)

    def ask(self, command: str, *arguments: Any) -> list[dict[str, Any]]:
        """Answers of all workers to a command, whose arguments are plain data.

        Raises:
            RefitError: of the kind that a worker raised.
        """
        payload = _pickled([(command, json.dumps(arguments))])
        return self._answers(command, self.update([payload] * self.settings["tp_size"]))

    def deliver(self, payloads: list[str]) -> list[dict[str, Any]]:
        """Load a flattened bucket on each worker with rlrefit's loader in place of SGLang's own. As :meth:`ask`."""
        return self._answers("load", self.update(payloads))

    def _answers(self, command: str, answer: Answer) -> list[dict[str, Any]]:
        try:
            found, _ = json.JSONDecoder().raw_decode(answer.message)
        except ValueError as error:
            raise RefitError(
                f"SGLang's workers did not answer {command} but said {answer.message!r}: rlrefit's loader is not active in them; "
                f"the engine's log says why. Start an engine of SGLang {' or '.join(TESTED)}",
                stage="settings",
            ) from error
        return raise_refit_errors(found, "SGLang worker")

    def state(self) -> EngineState:
        """What sleeps and whether the engine is paused, whoever did it; it does not wait for running requests."""
        found: EngineState = self.step("state").value
        return found

    def flush(self, seconds: float | None = None) -> Answer:
        """Flush the caches; batches that are about to end get ``seconds`` for it."""
        return self._caller.call(Step("flush_cache", {} if seconds is None else {"timeout_s": seconds}))

    def require_no_store(self) -> None:
        """Check before a refit: a store can be attached to a running engine that has host memory for its cache.

        Raises:
            RefitError: the engine has a store now.
        """
        if not self.settings["enable_hierarchical_cache"]:
            return
        self.settings = self._caller.call(Step("settings")).value
        if found := stores_of(self.settings):
            raise RefitError(
                f"SGLang has a store that rlrefit can't empty: {'; '.join(found)}. Nothing was written; detach it (DELETE "
                "/hicache/storage-backend), and do not attach its contents again",
                stage="settings",
            )


def _accepted(name: str, answer: Answer) -> Answer:
    if not answer.success:
        raise RefitError(f"SGLang refused {name}: {answer.message}", stage="transfer")
    return answer


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _plain(value: Any) -> Any:
    """Bytes as text, which the server decodes."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_plain(found) for found in value] if isinstance(value, list) else value


def _late(step: Step, seconds: float) -> RefitTimeout:
    return RefitTimeout(
        f"SGLang did not answer {step.name} within {seconds:.0f} s: requests do not end, or a worker hangs or has ended. Weights "
        "that were written in part are not served; look at the engine's log and restart it",
        stage="transfer",
    )


def _pickled(command: list[Any]) -> str:
    """Lists, tuples and text alone: SGLang's safe unpickler reads these on any host."""
    return base64.b64encode(pickle.dumps(command)).decode()
