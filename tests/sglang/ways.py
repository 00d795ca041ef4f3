"""The three ways to a double of an engine: blocking, from coroutines, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.sglang.callers import _REQUESTS, _SESSIONS, EngineCaller, HttpCaller
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.pausing import PauseMode
from rlrefit.workers.engines.sglang.sender import SglangSender

from .engine_double import EngineDouble, Holder, ManagerDouble, equal, weights
from .recorded import PATHS, SESSION_PATHS

WAYS = ("blocking", "awaited", "over HTTP")
TIMEOUT_S = 0.2
CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


class StillTrainer:
    """A trainer with nothing to move, as a cycle wants one."""

    def onload(self) -> None:
        pass

    offload = free = empty_cache = onload

    def memory(self, *, restart: bool = False) -> list[Any]:
        return []


class Driven:
    """An engine, and a driver of it in one of the ways; a trainer sends it buckets, of which it takes several.

    Args:
        engine: the double.
        open: makes another driver.
        url: of the server, over HTTP.
    """

    def __init__(self, engine: EngineDouble, open: Callable[[], SglangRefit], url: str = "") -> None:
        self.engine, self.open, self.url = engine, open, url
        self.manager = engine.tokenizer_manager
        self.source = Holder(0)

    @cached_property
    def refit(self) -> SglangRefit:
        return self.open()

    @cached_property
    def sender(self) -> SglangSender:
        return SglangSender(self.source, self.refit, "cpu", 128)

    def by_another_caller(self, call: Coroutine[Any, Any, Any]) -> None:
        """Of SGLang's own methods."""
        loop = self.engine.loop
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(call, loop).result(20)
        else:
            loop.run_until_complete(call)

    def released(self, *tags: str) -> None:
        """By another caller, who pauses nothing; without tags all of it."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput as Release

        asked = Release(tags=list(tags) or None)
        self.by_another_caller(self.manager.release_memory_occupation(asked, None))

    def paused(self, mode: str) -> None:
        """By another caller."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput as Pause

        self.by_another_caller(self.manager.pause_generation(Pause(mode=mode)))

    def take_on(self, index: int) -> None:
        """Other weights for the trainer, and none for the engine."""
        self.source.take_on(index)
        self.manager.holder.poison()

    def require_served(self, index: int) -> None:
        """The engine generates, with these weights."""
        self.refit.require_servable()
        assert equal(self.manager.holder.held, weights(index))
        assert not self.manager.paused

    def bring(self, version: int, index: int, *mode: PauseMode) -> RefitRecord:
        """A refit, of which the engine serves the weights afterwards."""
        self.take_on(index)
        record = self.sender.refit(version, *mode)
        self.require_served(index)
        assert not self.manager.stale_prefixes
        assert (self.refit.version, self.refit.weight_version()) == (version, str(version))
        return record

    @contextmanager
    def met(self) -> Iterator[Callable[[int, int], None]]:
        """A trainer rank that the engine has met: a function that brings a version shard to shard, with other weights."""
        server = open_rendezvous("127.0.0.1", 1, 1)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(RefitSession.open, server.rendezvous, 0, lambda: self.source, CONFIG)
            self.refit.join_refit(server.rendezvous.to_json(), 1, CONFIG)
            session = joining.result()

            def bring(version: int, index: int) -> None:
                self.take_on(index)
                sending = pool.submit(session.refit, version)
                [record] = self.refit.refit(version)
                sending.result()
                assert record["bytes_bulk"] == self.source.kept_bytes
                self.require_served(index)
                assert (self.refit.version, self.refit.weight_version()) == (version, str(version))

            yield bring
            self.refit.close_refit()
            session.close()
        server.close()

    def cycle(self, **options: bool) -> ColocatedCycle:
        return ColocatedCycle(
            self.refit, StillTrainer(), lambda version: [self.sender.refit(version)], **options
        )

    def turn(self, cycle: ColocatedCycle, version: int, index: int) -> None:
        """From training to generation with other weights."""
        self.take_on(index)
        cycle.to_generation(version)
        self.require_served(index)


@contextmanager
def driven_in(way: str, engine: EngineDouble) -> Iterator[Driven]:
    """The engine's loop runs in a thread beside the caller, unless blocking calls run it."""
    loop = engine.loop
    if way == "blocking":
        yield Driven(engine, lambda: SglangRefit(EngineCaller(engine), TIMEOUT_S))
        engine.close()
        return
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Server(engine)

    def awaited() -> SglangRefit:
        opening = asyncio.run_coroutine_threadsafe(AsyncSglangRefit.open(engine, TIMEOUT_S), loop)
        return opening.result(20).blocking

    def over_http() -> SglangRefit:
        return SglangRefit(HttpCaller(server.url, "key"), TIMEOUT_S)

    try:
        yield Driven(engine, awaited if way == "awaited" else over_http, server.url)
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        engine.close()


class Server:
    """The server's endpoints over a double."""

    def __init__(self, engine: EngineDouble) -> None:
        manager, loop = engine.tokenizer_manager, engine.loop

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                path, _, query = self.path.partition("?")
                sessions = SESSION_PATHS if hasattr(manager, "begin_weight_update") else {}
                name = {there: name for name, there in (PATHS | sessions).items()}.get(path)
                if name is None:
                    self.send_error(404)
                    return
                if name in sessions and self.command == "GET":
                    self.send_error(405)
                    return
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
        serving = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        serving.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


async def _endpoint(manager: ManagerDouble, name: str, query: str, fields: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.managers import io_struct

    if name == "settings":
        told = {
            "internal_states": await manager.get_internal_state(),
            "version": sys.modules["sglang"].__version__,
        }
        return vars(manager.server_args) | manager.updates | told
    if name == "weight_version":
        return {"weight_version": manager.config_value("weight_version")}
    if name == "update_weight_version":
        assert fields.pop("abort_all_requests") is False
        manager.record_config_updates("http", weight_version=fields["new_version"])
        return {"success": True}
    if name == "flush_cache":
        return asdict(await manager.flush_cache(float(query.removeprefix("timeout="))))
    structure, web = {**_REQUESTS, **_SESSIONS}[name]
    request = getattr(io_struct, structure)(**fields)
    result = await getattr(manager, name)(*((request, None) if web else (request,)))
    return {"success": result[0], "message": result[1]} if isinstance(result, tuple) else {}
