"""A client of a running inference server, vLLM's or SGLang's: it refits the server while requests run."""

from __future__ import annotations

from typing import Any

from ...integration.config import RefitConfig
from ...integration.errors import RefitError
from .common.answers import extended
from .common.http_calls import STAGE, HttpCalls
from .sglang.callers import HttpCaller
from .sglang.driver import SglangRefit
from .vllm.server import VllmServer


class RefitClient:
    """Refits a vLLM or SGLang server over HTTP; it finds out which one it is.

    The process needs neither vLLM nor SGLang. Calls block; one at a time. From coroutines: ``asyncio.to_thread(client.refit, 7)``.

    Args:
        url: of the server, ``http://host:port``.
        api_key: that the server asks for, if it does.
        timeout_s: how long the server may keep a call waiting, for running requests to end as well. Where its workers wait for the
            trainer, at least the ``call_limit_s`` of the ``RefitConfig``.

    Raises:
        RefitError: ``url`` leads to no such server, or the server can't be refitted as it was started; the text says how to start it.
        RefitTimeout: no answer.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._url, self._api_key, self._timeout_s = url, api_key, timeout_s
        self._engine = self._found()

    @property
    def version(self) -> int:
        """Of the weights that the server may serve, -1 before the first refit; of vLLM's data-parallel replicas the first one's.

        Raises:
            EngineDirty: they are not whole on a worker.
            RefitError: workers hold different versions.
        """
        return self._engine.version

    def require_servable(self) -> None:
        """Check before requests are given to the server, since a paused one keeps them waiting.

        Raises:
            EngineDirty: a refit failed, the server is paused, or its weights are not whole or asleep.
        """
        self._engine.require_servable()

    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str = "nccl_xfer"
    ) -> None:
        """Have the server's workers meet the trainer, while its ranks join; also after a failed refit or a restart of the server.

        Args:
            rendezvous: that trainer rank 0 opened.
            first_rank: refit rank of the server's first worker: the number of the trainer's ranks, and of a further server the workers
                before it, too.
            config: the trainer's.
            engine: name of the checkpoint engine, the same as on the trainer.

        Raises:
            RefitError: of the type that the worker raised. Nothing was written.
        """
        # Anew: the server may have been restarted, as another one too.
        self._engine = self._found(config.call_limit_s)
        self._engine.join_refit(rendezvous, first_rank, config, engine)

    def refit(self, version: int, mode: Any = None) -> list[dict[str, Any]]:
        """Have the server receive the weights, while the trainer's ranks call ``refit(version)``, and serve them from then on.

        Args:
            version: the same as on the trainer.
            mode: what becomes of running requests. vLLM: ``keep`` (they go on with the new weights; taken if left out), ``wait``,
                ``abort``. SGLang: ``wait`` (they end first; taken if left out), ``abort``, ``retract``.

        Returns:
            The workers' records; of vLLM's data-parallel replicas the first one's.

        Raises:
            RefitError: of the type that the worker raised, with its ``stage``, ``rank`` and ``blamed``. The text says whether the
                server is as it was or stays paused, and what to do.
        """
        try:
            return self._engine.refit(version, *([] if mode is None else [mode]))
        except RefitError as error:
            if self._engine.unusable is None:
                state = (
                    "The server is as it was before this call, or, if only its answer was lost, serves the new weights: version tells. "
                    "If trainer ranks have called refit, both sides have to meet again "
                    "(join_refit with a new rendezvous)"
                )
            else:
                state = (
                    f"The server stays paused, because not all of its workers are known to hold the version before {version} whole. "
                    "Have both sides meet again (join_refit with a new rendezvous) and refit, which resumes it; restart it first if "
                    "it has ended"
                )
            raise extended(error, state) from error

    def records(self) -> list[dict[str, Any]]:
        """What each worker tells of the last refit, whoever asked for it; of vLLM's data-parallel replicas the first one's.

        Returns:
            Of each the fields of its record of the last refit that committed; none before it. If a later one failed, also
            ``failed_attempt``: the ``version`` that was asked for, and of the error ``type`` and ``text``, and if it is rlrefit's ``stage``,
            ``rank``, ``parameter`` and ``blamed``.
        """
        return self._engine.records()

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self._engine.close_refit()

    def _found(self, call_limit_s: float = 0.0) -> VllmServer | SglangRefit:
        http = HttpCalls(self._url, self._api_key, self._timeout_s)
        tried = []
        for path, known_by in (("/version", "version"), ("/server_info", "internal_states")):
            answer = http.ask("GET", path)
            if answer.status in (401, 403):
                raise RefitError(
                    f"the server at {http.url} answered GET {path} with {answer.status}: {answer.words}. Give RefitClient its api_key",
                    stage="settings",
                )
            if answer.status == 200 and known_by in answer.content:
                if path == "/version":
                    return VllmServer(http)
                # One limit for all: each of SGLang's answers may have to wait for its workers.
                limit_s = max(self._timeout_s, call_limit_s)
                return SglangRefit(HttpCaller(self._url, self._api_key, limit_s), self._timeout_s)
            tried.append(f"GET {path} gives {answer.status}")
        raise RefitError(
            f"the server at {http.url} is neither vLLM's nor SGLang's: {', '.join(tried)}. Nothing was asked of it; look at the URL",
            stage=STAGE,
        )
