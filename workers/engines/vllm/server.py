"""A vLLM server, refitted over HTTP by one call of ours, or by those of its own weight transfer.

A refit pauses the server, opens an update, receives the weights, closes the update, and resumes. vLLM's core refuses the update while
requests run, and drops what the old weights made (:func:`~.patches.watch_weight_updates`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

from ....integration.config import RefitConfig
from ....integration.control import Rendezvous
from ....integration.control.channel import refusals_told
from ....integration.errors import EngineDirty, RefitError, RefitTimeout
from ..common.answers import heard, raise_refit_errors
from ..common.http_calls import STAGE, HttpAnswer, HttpCalls, NotReached
from .driver import PauseMode, one_version

logger = logging.getLogger(__name__)

# How to start a server that can be refitted.
COMMAND = 'VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{"backend": "rlrefit"}\', with rlrefit installed beside vLLM'
# What all workers of rlrefit answer at any time.
_ASLEEP = "refit_asleep"
# The path of :mod:`.refit_route`, which needs vLLM to be imported.
_AT_ONCE = "/refit"
# What servers and proxies answer that have no such route, or let none through.
_LACKING = (403, 404, 405, 501)
# Seconds for a call that follows a failed one, and again if it was not answered: an engine that ends leaves calls without an answer,
# which the server's health alone tells.
_AFTERWARDS_S = (1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass
class _SoFar:
    """How far a refit has come.

    Attributes:
        asked: whether the server was asked to change anything.
        was_paused: whether it was paused before; None if that is not known.
        sent: whether an update may have been opened.
    """

    asked: bool = False
    was_paused: bool | None = None
    sent: bool = False


class VllmServer:
    """Drives a vLLM server in development mode with rlrefit's backend.

    Args:
        http: calls of the server.

    Attributes:
        unusable: the error of a refit that left the server paused, until one succeeds; None if there is none.

    Raises:
        RefitError: the server can't be refitted as it was started.
    """

    def __init__(self, http: HttpCalls) -> None:
        self._http = http
        # Seconds for the calls in which the workers wait for the trainer; none before they have met one.
        self._limit_s: float | None = None
        # Whether the server has :mod:`.refit_route`, as far as is known.
        self._at_once = True
        self.unusable: BaseException | None = None
        if http.ask("GET", "/is_paused").status == 404:
            raise RefitError(
                f"the vLLM server at {http.url} is not in development mode, so it has no calls for weights. Nothing was asked of it; "
                f"start it as {COMMAND}",
                stage="start",
            )
        answer = http.ask("POST", "/collective_rpc", {"method": _ASLEEP})
        if answer.status != 200 and _ASLEEP in answer.words:
            raise RefitError(
                f"the workers of the vLLM server at {http.url} do not have rlrefit's backend (POST /collective_rpc: "
                f"{answer.status}, {answer.words}). Nothing has changed; start it as {COMMAND}",
                stage="start",
            )
        self._checked("POST /collective_rpc", answer)

    @property
    def version(self) -> int:
        """Of the weights that may be served, -1 before the first refit.

        Raises:
            EngineDirty: they are not whole on a worker.
            RefitError: workers hold different versions.
        """
        return one_version(self._rpc("refit_serving_version"))

    def require_servable(self) -> None:
        """Check before requests are given to the server; a paused one would keep them waiting.

        Raises:
            EngineDirty: a refit failed, the server is paused, or its weights are not whole or asleep.
        """
        if self.unusable is not None:
            raise EngineDirty(
                f"the last refit failed and left the server paused: {type(self.unusable).__name__}: {self.unusable}",
                stage="generate",
            )
        if self._is_paused():
            raise EngineDirty(
                f"the server at {self._http.url} is paused, so nothing would be generated. POST /resume, or refit, which resumes it",
                stage="generate",
            )
        self._rpc("refit_require_servable")

    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str = "nccl_xfer"
    ) -> None:
        """Have all workers meet the trainer; ``first_rank`` is the refit rank of the first of them.

        Raises:
            RefitError: of the type that the worker raised; or an adapter is to come alone. Nothing was written.
        """
        with refusals_told(Rendezvous.from_json(rendezvous), first_rank):
            if config.lora == "adapter":
                raise RefitError(
                    "policy.refit.lora is adapter, but no request to a server can name the trainer's adapter, so that all would be "
                    "answered by the base model, whatever the version. Nothing has moved; set it to merge on all ranks of both "
                    "sides, or drive vLLM in a process of your own (VllmDriver, AsyncVllmDriver)",
                    stage="settings",
                )
        self._limit_s, self._at_once = None, True
        limit_s = max(self._http.timeout_s, config.call_limit_s)
        init_info = {
            "rendezvous": rendezvous,
            "first_rank": first_rank,
            "refit_config": asdict(config),
            "engine": engine,
        }
        self._post("/init_weight_transfer_engine", {"init_info": init_info}, limit_s)
        self._limit_s = limit_s

    def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        """Have all workers receive the weights, and serve ``version`` from then on.

        Args:
            version: the same as on the trainer.
            mode: what becomes of running requests.

        Returns:
            The workers' records; of data-parallel replicas the first one's.

        Raises:
            RefitError: of the type that the worker raised. If all workers hold the older version whole, the server goes on as it was;
                else it stays paused until a refit succeeds.
        """
        if mode not in get_args(PauseMode):
            raise RefitError(
                f"mode: {mode!r} is not one of {', '.join(get_args(PauseMode))}, which a vLLM server knows",
                stage="settings",
            )
        if self._limit_s is None:
            raise RefitError("no trainer has been met; call join_refit first", stage="handshake")
        earlier = self.unusable
        # So that an exception of any kind, an interrupt too, leaves a server that is known to be unusable.
        self.unusable = RefitError(f"refit {version} was interrupted", stage="commit")
        so_far = _SoFar()
        try:
            records = self._refit_at_once(version, mode, so_far)
            if records is None:
                records = self._refit_by_calls(version, mode, so_far)
        except RefitError as error:
            if not so_far.asked:
                self.unusable = earlier
            else:
                goes_on = earlier is None and self._goes_on_after(version, so_far)
                self.unusable = None if goes_on else error
            raise
        self.unusable = None
        return records

    def _refit_at_once(self, version: int, mode: PauseMode, so_far: _SoFar) -> list[dict[str, Any]] | None:
        """By one call; None of a server that does not have it. Not where requests are waited for, which has a limit of its own."""
        if not self._at_once or mode == "wait":
            return None
        # Until the server tells how far it came.
        so_far.asked = so_far.sent = True
        fields = {"version": version, "mode": mode}
        try:
            answer = self._http.ask("POST", _AT_ONCE, fields, timeout_s=self._limit_s)
        except NotReached:
            so_far.asked = False
            raise
        told = answer.content.keys() >= {"was_paused", "sent"}
        if answer.status in _LACKING and not told:
            self._at_once = so_far.asked = so_far.sent = False
            return None
        if told:
            so_far.was_paused, so_far.sent = answer.content["was_paused"], answer.content["sent"]
        return raise_refit_errors(self._checked(f"POST {_AT_ONCE}", answer)["results"])

    def _refit_by_calls(self, version: int, mode: PauseMode, so_far: _SoFar) -> list[dict[str, Any]]:
        so_far.was_paused = self._is_paused()
        so_far.asked = True
        # What sleeps runs nothing; to be paused, replicas would take steps together, in memory that is not there.
        if not (so_far.was_paused and self._asleep()):
            self._post(f"/pause?mode={mode}")
        self._post("/start_weight_update", {})
        so_far.sent = True
        self._post("/update_weights", {"update_info": {"version": version}}, self._limit_s)
        self._post("/finish_weight_update")
        records = self.records()
        self._post("/resume")
        return records

    def records(self) -> list[dict[str, Any]]:
        """What each worker tells of the last refit; of data-parallel replicas the first one's."""
        return self._rpc("refit_record")

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self._rpc("close_refit")
        self._limit_s = None

    def _is_paused(self, timeout_s: float | None = None) -> bool:
        return bool(self._get("/is_paused", timeout_s)["is_paused"])

    def _asleep(self) -> bool:
        return any(answer["asleep"] for answer in self._rpc(_ASLEEP))

    def _goes_on_after(self, version: int, so_far: _SoFar) -> bool:
        """Whether the server serves after a failed refit, which is resumed if that has paused it."""
        held = self._held(so_far.sent)
        if so_far.was_paused is None:
            # Its answer was lost: it may have resumed with the new weights, and who paused it is not known.
            return held is not None and not self._paused_at_last()
        return held not in (None, version) and (so_far.was_paused or self._resumed())

    def _held(self, sent: bool) -> int | None:
        """The version that all workers are known to hold whole; None if that is not known, as where another one may have been ``sent``
        and not all of them answer."""
        try:
            answers = self._afterwards(partial(self._rpc, "refit_serving_version"))
            workers = self._afterwards(partial(self._get, "/get_world_size"))["world_size"]
            if sent and len(answers) < workers:
                # vLLM passes on the answers of the first data-parallel replica alone.
                logger.warning(
                    "%d of %d workers told their version, so the server stays paused", len(answers), workers
                )
                return None
            return one_version(answers)
        except RefitError as error:
            logger.warning("after a failed refit the server stays paused: %s", error)
            return None

    def _paused_at_last(self) -> bool:
        """Whether the server is paused after a failed refit, or does not tell."""
        try:
            return self._afterwards(self._is_paused)
        except RefitError as error:
            logger.warning("the server does not tell whether it is paused: %s", error)
            return True

    def _resumed(self) -> bool:
        """Resume; whether it did."""
        try:
            self._afterwards(partial(self._post, "/resume", None))
        except RefitError as error:
            logger.warning("the server could not be resumed: %s", error)
            return False
        return True

    def _afterwards[T](self, ask: Callable[[float], T]) -> T:
        """What ``ask`` gives, which takes its limit in seconds and may be called again.

        Raises:
            RefitError: also that the server is not healthy, once it has not answered.
        """
        for limit_s in _AFTERWARDS_S:
            try:
                return ask(limit_s)
            except RefitTimeout as error:
                late = error
                self._get("/health", limit_s)
        raise late

    def _rpc(self, method: str, timeout_s: float | None = None) -> list[dict[str, Any]]:
        found = self._post("/collective_rpc", {"method": method}, timeout_s)
        return raise_refit_errors(found["results"])

    def _get(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return self._checked(f"GET {path}", self._http.ask("GET", path, timeout_s=timeout_s))

    def _post(
        self, path: str, fields: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        return self._checked(f"POST {path}", self._http.ask("POST", path, fields, timeout_s=timeout_s))

    def _checked(self, route: str, answer: HttpAnswer) -> dict[str, Any]:
        """What the server answered.

        Raises:
            RefitError: an error; of the worker's type if it is one's.
        """
        if answer.status == 200:
            return answer.content
        whose = f"the vLLM server at {self._http.url} answered {route} with {answer.status}: "
        raise heard(answer.words, whose) or RefitError(whose + answer.words, stage=STAGE)
