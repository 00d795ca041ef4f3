"""The client of servers: on an SGLang server's endpoints, and where there is no server that it knows.

``tests/vllm/test_vllm_server.py`` has it on a vLLM server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitMismatch, RefitTimeout
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.common.http_calls import HttpCalls
from rlrefit.workers.engines.http_client import RefitClient

from .engine_double import EngineDouble, ManagerDouble, equal, weights
from .ways import CONFIG, Driven, driven_in


@dataclass
class Scene:
    """A server, a trainer rank, and a client that has them meet."""

    driven: Driven
    client: RefitClient
    pool: ThreadPoolExecutor
    stack: ExitStack
    session: Any = None

    def meet(self) -> None:
        server = self.stack.enter_context(closing(open_rendezvous("127.0.0.1", 1, 1)))
        joining = self.pool.submit(
            RefitSession.open, server.rendezvous, 0, lambda: self.driven.source, CONFIG
        )
        self.client.join_refit(server.rendezvous.to_json(), 1, CONFIG)
        self.session = self.stack.enter_context(closing(joining.result()))

    def refit(self, version: int, index: int, **mode: str) -> None:
        self.driven.take_on(index)
        sending = self.pool.submit(self.session.refit, version)
        [record] = self.client.refit(version, **mode)
        sending.result()
        manager = self.driven.manager
        assert (record["version"], record["rank"], self.client.version) == (version, 1, version)
        assert equal(manager.holder.held, weights(index))
        assert not manager.paused
        assert not manager.stale_prefixes
        self.client.require_servable()


@pytest.fixture
def scene(sglang: None) -> Iterator[Scene]:
    with (
        ThreadPoolExecutor(1) as pool,
        driven_in("over HTTP", EngineDouble()) as driven,
        ExitStack() as stack,
    ):
        found = Scene(driven, RefitClient(driven.url, "key"), pool, stack)
        found.meet()
        yield found


def test_a_server_is_refitted_by_the_same_two_calls_as_vllms(scene: Scene) -> None:
    scene.refit(0, 1)
    scene.refit(1, 0, mode="abort")
    scene.client.close_refit()
    scene.meet()
    scene.refit(2, 1)


def test_a_mode_that_sglang_does_not_have_and_a_trainer_that_was_not_met_are_refused(scene: Scene) -> None:
    scene.refit(0, 1)
    with pytest.raises(RefitError, match="no trainer has been met"):
        RefitClient(scene.driven.url).refit(1)
    with pytest.raises(RefitError, match="wait, abort, retract") as refused:
        scene.client.refit(1, mode="keep")
    assert refused.value.stage == "settings"
    scene.client.require_servable()


def test_a_refit_that_fails_before_a_byte_leaves_the_server_running(scene: Scene) -> None:
    scene.refit(0, 1)
    [before] = scene.client.records()
    sending = scene.pool.submit(scene.session.refit, 7)
    with pytest.raises(RefitMismatch, match="as it was") as failed:
        scene.client.refit(1)
    [told] = scene.client.records()
    attempt = told.pop("failed_attempt")
    assert (told, told["version"]) == (before, 0)
    assert (attempt["version"], attempt["type"]) == (1, "RefitMismatch")
    assert (attempt["stage"], attempt["rank"]) == (failed.value.stage, failed.value.rank)
    assert attempt["text"] in str(failed.value)
    assert isinstance(sending.exception(), RefitMismatch)
    assert failed.value.stage.startswith("begin")
    assert not scene.driven.manager.paused
    scene.client.require_servable()
    scene.meet()
    scene.refit(1, 0)
    assert [told["version"] for told in scene.client.records() if "failed_attempt" not in told] == [1]


def test_a_refit_that_fails_after_a_byte_leaves_the_server_paused_until_the_next_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.refit(0, 1)
    worker = scene.driven.manager.worker

    def failing(version: int) -> None:
        worker.refit_state.mark_dirty(version)
        raise PeerLost("a trainer died in the middle", stage="transfer", rank=1, blamed=0)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "refit", failing)
        with pytest.raises(PeerLost, match=r"stays paused.*join_refit") as failed:
            scene.client.refit(1)
    found = failed.value
    assert (found.stage, found.rank, found.blamed) == ("transfer", 1, 0)
    assert scene.driven.manager.paused
    with pytest.raises(EngineDirty):
        scene.client.require_servable()
    scene.meet()
    scene.refit(1, 0)


def test_a_server_that_was_restarted_is_met_anew(scene: Scene) -> None:
    scene.refit(0, 1)
    manager, fresh = scene.driven.manager, ManagerDouble()
    manager.worker, manager.holder, manager.attached = fresh.worker, fresh.holder, False
    with pytest.raises(RefitError, match="restarted"):
        scene.client.refit(1)
    assert not manager.paused
    scene.meet()
    scene.refit(1, 0)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost:8000", "http://", "http://localhost:port", "http://[::1"]
)
def test_what_is_no_servers_address_is_refused(url: str) -> None:
    with pytest.raises(RefitError, match="http://host:8000") as refused:
        RefitClient(url)
    assert refused.value.stage == "settings"


@pytest.mark.parametrize("end", ["?key=hidden", "/#hidden"])
@pytest.mark.parametrize("user", ["", "me:hidden@"])
def test_an_address_with_a_secret_is_refused_without_telling_it(user: str, end: str) -> None:
    with pytest.raises(RefitError, match="localhost") as refused:
        RefitClient(f"http://{user}localhost:8000{end}")
    assert refused.value.stage == "settings"
    assert "hidden" not in str(refused.value)


def test_the_key_goes_through_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(RefitTimeout, match=url):
                RefitClient(url, api_key="key", timeout_s=0.2)
            server.settimeout(5.0)
            caller, _ = server.accept()
            with caller:
                assert b"Bearer key" in caller.recv(4096)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_is_asked_where_a_server_redirects_to(status: int, method: str) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header(
                "Location", f"http://me:hidden@127.0.0.1:{self.server.server_port}/login?key=hidden"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        calls = HttpCalls(f"http://127.0.0.1:{server.server_port}", api_key="key")
        with pytest.raises(RefitError, match=f"127.0.0.1:{server.server_port}/login") as refused:
            calls.ask(method, "/pause", {} if method == "POST" else None)
        server.shutdown()
    assert asked == ["/pause"]
    assert "hidden" not in str(refused.value)


def test_a_server_that_is_not_there_or_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RefitTimeout, match=url):
            RefitClient(url, timeout_s=0.1)
    with pytest.raises(RefitError, match=url) as refused:
        RefitClient(url)
    assert refused.value.stage == "http"


def test_a_server_that_ends_in_the_middle_of_an_error_is_named() -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(500)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"the engine")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(RefitError, match=str(server.server_port)) as failed:
            RefitClient(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert failed.value.stage == "http"


@pytest.mark.parametrize(("status", "asked_for"), [(401, "api_key"), (500, "neither vLLM's nor SGLang's")])
def test_a_server_that_does_not_tell_what_it_is_is_refused(status: int, asked_for: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_error(status)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(RefitError, match=asked_for):
            RefitClient(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
