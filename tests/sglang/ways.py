"""The three ways to a double of an engine: blocking, from coroutines, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.records.record import RefitRecord
from rlrefit.workers.engines.sglang.callers import _REQUESTS, EngineCaller, HttpCaller
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.pausing import PauseMode
from rlrefit.workers.engines.sglang.sender import SglangSender

from .engine_double import EngineDouble, Holder, ManagerDouble, equal, weights
from .recorded import PATHS

Work = Callable[[SglangRefit], Any]


class Trainer:
    """A trainer with nothing to move, as a cycle wants one."""

    def onload(self) -> None:
        pass

    offload = free = empty_cache = onload

    def memory(self, *, restart: bool = False) -> list[Any]:
        return []


class Sending:
    """A trainer whose weights go to an engine in buckets, of which it takes several, and what they find and leave there."""

    def __init__(self, refit: SglangRefit, engine: EngineDouble) -> None:
        self.refit, self._manager = refit, engine.tokenizer_manager
        self.source = Holder(0)
        self.sender = SglangSender(self.source, refit, "cpu", 128)

    def take_on(self, index: int) -> None:
        """Other weights for the trainer, and none for the engine."""
        self.source.take_on(index)
        self._manager.holder.poison()

    def require_served(self, index: int) -> None:
        """The engine generates, with these weights."""
        self.refit.require_servable()
        assert equal(self._manager.holder.held, weights(index))
        assert not self._manager.paused

    def bring(self, version: int, index: int, *mode: PauseMode) -> RefitRecord:
        """A refit, of which the engine serves the weights afterwards."""
        self.take_on(index)
        record = self.sender.refit(version, *mode)
        self.require_served(index)
        assert not self._manager.stale_prefixes
        return record

    def cycle(self, **options: bool) -> ColocatedCycle:
        return ColocatedCycle(self.refit, Trainer(), lambda version: [self.sender.refit(version)], **options)

    def turn(self, cycle: ColocatedCycle, version: int, index: int) -> None:
        """From training to generation with other weights."""
        self.take_on(index)
        cycle.to_generation(version)
        self.require_served(index)


class Server:
    """The server's endpoints over a double."""

    def __init__(self, engine: EngineDouble) -> None:
        manager, loop = engine.tokenizer_manager, engine.loop

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                path, _, query = self.path.partition("?")
                name = {there: name for name, there in PATHS.items()}[path]
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fields = json.loads(body) if body else {}
                found = asyncio.run_coroutine_threadsafe(_endpoint(manager, name, query, fields), loop)
                content = found.result(20)
                self.send_response(200 if content.get("success", True) else 400)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            do_GET = do_POST = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


async def _endpoint(manager: ManagerDouble, name: str, query: str, fields: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.managers import io_struct

    if name == "settings":
        return (
            vars(manager.server_args)
            | manager.updates
            | {
                "internal_states": await manager.get_internal_state(),
                "version": sys.modules["sglang"].__version__,
            }
        )
    if name == "weight_version":
        return {"weight_version": manager.config_value("weight_version")}
    if name == "update_weight_version":
        assert fields.pop("abort_all_requests") is False
        manager.record_config_updates("http", weight_version=fields["new_version"])
        return {"success": True}
    if name == "flush_cache":
        found = await manager.flush_cache(float(query.removeprefix("timeout=")))
        return asdict(found)
    structure, web = _REQUESTS[name]
    request = getattr(io_struct, structure)(**fields)
    result = await getattr(manager, name)(*((request, None) if web else (request,)))
    return {"success": result[0], "message": result[1]} if isinstance(result, tuple) else {}


def blocking(engine: EngineDouble, work: Work) -> Any:
    return work(SglangRefit(EngineCaller(engine), timeout_s=0.2))


def awaited(engine: EngineDouble, work: Work) -> Any:
    async def scenario() -> Any:
        refit = await AsyncSglangRefit.open(engine, timeout_s=0.2)
        return await refit.run(work, refit.blocking)

    return engine.loop.run_until_complete(scenario())


def over_http(engine: EngineDouble, work: Work) -> Any:
    server = Server(engine)

    async def scenario() -> Any:
        return await asyncio.to_thread(
            lambda: work(SglangRefit(HttpCaller(server.url, "key"), timeout_s=0.2))
        )

    try:
        return engine.loop.run_until_complete(scenario())
    finally:
        server.close()


WAYS = {"blocking": blocking, "awaited": awaited, "over HTTP": over_http}
