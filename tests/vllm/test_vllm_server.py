"""``vllm serve``, refitted over HTTP by the client, with requests in flight."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import requests
from vllm_checkpoints import dense_config, write_checkpoint

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitMismatch, RefitTimeout
from rlrefit.workers.engines.common.http_calls import HttpAnswer, HttpCalls
from rlrefit.workers.engines.http_client import RefitClient
from rlrefit.workers.engines.vllm import server
from rlrefit.workers.engines.vllm.server import VllmServer
from tests.megatron_trainers import CONFIG, RANKS, Trainers
from tests.refit.meeting import join
from tests.spawn import free_port
from tests.vllm_servers import BACKEND, ENVIRONMENT, running, serve_routes, serving, write_tokenizer

pytestmark = pytest.mark.timeout(400)

MODEL = "qwen3"
PROMPT = [5, 17, 33, 90]
# Fills whole blocks of the KV cache, so that its prefix is kept for the next request.
LONG_PROMPT = [3 + i % 100 for i in range(200)]
# Enough of them, at that many seconds each, that the request runs until it is paused on a busy machine too, or for as long as a
# test needs that does not pause it. Few, since each is computed several times.
TOKENS, MANY, SHORT, PACE_S = 48, 128, 24, 0.07
PROBED = [*BACKEND, "--worker-extension-cls", "vllm_probe.ProbeExtension"]


@dataclass
class Served:
    """A server that started with weights A, its trainer, and a client of it.

    Attributes:
        digests: of A and B, as the server itself loads them.
    """

    url: str
    trainers: Trainers
    paths: tuple[str, str]
    client: RefitClient
    pool: ThreadPoolExecutor
    running: ExitStack
    version: int = -1
    digests: list[Any] = field(default_factory=list)

    def restart(self) -> None:
        self.running.close()
        self.running.enter_context(serving(self.paths[0], self.url, *PROBED))

    def meet(self) -> None:
        """A new epoch."""
        rendezvous = self.trainers.do("open", MODEL, 1)[0]
        joining = self.trainers.start("join", MODEL, rendezvous)
        self.client.join_refit(rendezvous, RANKS, RefitConfig(**CONFIG))
        joining.result()

    def post(self, route: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(f"{self.url}/{route}", json=body or {}, timeout=200)

    def probe(self, method: str, *args: Any) -> Any:
        answered = self.post("collective_rpc", {"method": method, "args": args})
        answered.raise_for_status()
        return answered.json()["results"][0]

    def stream(self, prompt: list[int], tokens: int, into: list[int]) -> list[int]:
        """Tokens as they come."""
        asked = {
            "model": self.paths[0],
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with requests.post(f"{self.url}/v1/completions", json=asked, stream=True, timeout=200) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                text = line.decode().removeprefix("data: ")
                if text and text != "[DONE]":
                    into.extend(json.loads(text)["choices"][0]["token_ids"])
        return into

    def complete(self, prompt: list[int], tokens: int = SHORT) -> list[int]:
        return self.stream(prompt, tokens, [])

    @cached_property
    def undisturbed(self) -> list[int]:
        """What a request of many tokens gives with the weights A, which a test that asks for it first has to have."""
        assert self.probe("refit_parameter_digests") == self.digests[0]
        return self.complete(PROMPT, MANY)

    def begin(self, tokens: int = TOKENS) -> tuple[list[int], Future[list[int]]]:
        """A request that has given its first tokens and has many to go: those so far, and all of them for :meth:`end`."""
        self.probe("probe_pace", PACE_S)
        so_far: list[int] = []
        whole = self.pool.submit(self.stream, PROMPT, tokens, so_far)
        while len(so_far) < 4 and not whole.done():
            time.sleep(0.002)
        assert len(so_far) < tokens
        return so_far, whole

    def end(self, whole: Future[list[int]]) -> list[int]:
        """All tokens of a request of :meth:`begin`."""
        self.probe("probe_pace", 0.0)
        return whole.result()

    def refit_with(self, index: int) -> None:
        """The trainer takes on A (0) or B (1) and sends it."""
        self.version += 1
        sending = self.trainers.start("refit", MODEL, index, self.version)
        [record] = self.client.refit(self.version)
        assert all(isinstance(record, dict) for record in sending.result())
        assert (record["version"], record["rank"], self.client.version) == (self.version, RANKS, self.version)
        assert self.probe("refit_parameter_digests") == self.digests[index]

    @property
    def paused(self) -> bool:
        return bool(requests.get(f"{self.url}/is_paused", timeout=60).json()["is_paused"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    root = tmp_path_factory.mktemp("checkpoints")
    config = dense_config()
    config.vocab_size = 128  # without padding, which would keep the poison that it is given
    first, second = (str(write_checkpoint(root / f"seed-{seed}", config, seed)) for seed in (1, 2))
    for path in (first, second):
        write_tokenizer(path)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        yield first, second


@pytest.fixture(scope="module")
def served(checkpoints: tuple[str, str]) -> Iterator[Served]:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        closing(Trainers({MODEL: list(checkpoints)})) as trainers,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as running,
    ):
        running.enter_context(serving(checkpoints[0], url, *PROBED))
        started = Served(url, trainers, checkpoints, RefitClient(url), pool, running)
        started.digests = [started.probe("refit_parameter_digests")]
        started.probe("probe_engine_load", checkpoints[1])
        started.digests.append(started.probe("refit_parameter_digests"))
        started.probe("probe_engine_load", checkpoints[0])
        assert started.post("reset_prefix_cache").ok
        assert started.client.version == -1
        started.meet()
        yield started
        trainers.do("close", MODEL)


def by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmServer, "_refit_at_once", lambda *_: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts ``change`` before the client's calls of a path: it gets the path and the body, and returns those to ask with.

    The client then refits by the calls of vLLM, as where a server does not have ours.
    """

    def put(path: str, change: Callable[[str, Any], tuple[str, Any]]) -> None:
        by_calls(monkeypatch)
        ask = HttpCalls.ask

        def changed(self: HttpCalls, method: str, to: str, fields: Any = None, **how: Any) -> HttpAnswer:
            to, fields = change(to, fields) if to.startswith(path) else (to, fields)
            return ask(self, method, to, fields, **how)

        monkeypatch.setattr(HttpCalls, "ask", changed)

    return put


def test_a_busy_server_that_was_not_paused_refuses_an_update_and_goes_on(served: Served):
    undisturbed = served.undisturbed
    so_far, whole = served.begin(MANY)
    for route, body in {"start_weight_update": {}, "update_weights": {"update_info": {"version": 0}}}.items():
        refused = served.post(route, body)
        assert len(so_far) < MANY
        assert refused.status_code == 500
        assert "POST /pause?mode=keep" in refused.text
    assert served.end(whole) == undisturbed


# What is refitted by vLLM's calls alone is refitted so with its caches kept, too.
@pytest.mark.parametrize(
    "way",
    ["at once", pytest.param("by vLLM's calls", marks=pytest.mark.full), "paused with its caches kept"],
)
def test_a_request_in_flight_and_those_after_it_get_the_new_weights_alone(
    served: Served, way: str, asked: Callable[..., None]
):
    """Twice there and back; what keeps its caches while it is paused has old keys and values of the request."""
    if way == "paused with its caches kept":
        asked("/pause", lambda path, fields: (f"{path}&clear_cache=false", fields))

    def poisoned(path: str, fields: Any) -> tuple[str, Any]:
        served.probe("probe_poison")
        return path, fields

    if way != "at once":
        asked("/update_weights", poisoned)
    old, old_long = served.undisturbed[:TOKENS], served.complete(LONG_PROMPT)
    for index in (1, 0):
        so_far, whole = served.begin()
        served.refit_with(index)
        assert len(so_far) < TOKENS
        assert served.probe("refit_serving_version") == {"version": served.version}
        tokens = served.end(whole)
        turn = next(i for i, (a, b) in enumerate(zip(old, tokens, strict=True)) if a != b)
        assert turn >= 4
        # What a request that has never seen the old weights makes of the same context.
        assert served.complete([*PROMPT, *tokens[:turn]], TOKENS - turn) == tokens[turn:]
        new, new_long = served.complete(PROMPT, TOKENS), served.complete(LONG_PROMPT)
        assert new != old
        assert new_long != old_long
        if index:
            served.probe("probe_poison")
            served.probe("probe_engine_load", served.paths[1])
            assert served.post("reset_prefix_cache").ok
            assert (served.complete(PROMPT, TOKENS), served.complete(LONG_PROMPT)) == (new, new_long)
        old, old_long = new, new_long


def test_a_refit_is_one_call_unless_requests_are_waited_for_or_the_server_lacks_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    ask, paths = HttpCalls.ask, list[str]()

    def noted(self: HttpCalls, method: str, path: str, *args: Any, **how: Any) -> HttpAnswer:
        paths.append(path)
        return ask(self, method, path, *args, **how)

    def refit(index: int, **how: Any) -> list[str]:
        served.version += 1
        sending = served.trainers.start("refit", MODEL, index, served.version)
        paths.clear()
        [record] = served.client.refit(served.version, **how)
        asked_for = list(paths)
        assert all(isinstance(record, dict) for record in sending.result())
        assert record["version"] == served.version
        assert served.probe("refit_parameter_digests") == served.digests[index]
        assert not served.paused
        return asked_for

    monkeypatch.setattr(HttpCalls, "ask", noted)
    assert refit(1) == ["/refit"]
    # As errors advise where vLLM keeps something of the old weights.
    assert served.post("finish_weight_update").ok
    assert "/refit" not in (of_vllm := refit(0, mode="wait"))
    monkeypatch.setattr(server, "_AT_ONCE", "/refit_of_another_release")
    assert refit(1) == ["/refit_of_another_release", *(path.replace("wait", "keep") for path in of_vllm)]
    assert refit(0) == [path.replace("wait", "keep") for path in of_vllm]
    served.client._engine._at_once = True  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body", [{}, {"version": None}, {"version": -1}, {"version": 1, "mode": "later"}, [], 7]
)
def test_a_call_that_lacks_what_it_needs_changes_nothing(served: Served, body: Any):
    answer = requests.post(f"{served.url}/refit", json=body, timeout=60)
    assert answer.status_code == 400
    assert not served.paused
    served.client.require_servable()


@pytest.mark.parametrize("paused", [False, True])
def test_where_the_answer_to_a_call_is_lost_the_client_looks_and_resumes_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, paused: bool
):
    ask = HttpCalls.ask

    def lost(self: HttpCalls, method: str, path: str, *args: Any, **how: Any) -> HttpAnswer:
        # Behind the server, or before it, where somebody else has paused that.
        answer = ask(self, method, path, *args, **how) if path != "/refit" or not paused else None
        if answer is None or path == "/refit":
            raise RefitError("the answer was lost", stage="http")
        return answer

    monkeypatch.setattr(HttpCalls, "ask", lost)
    if paused:
        assert requests.post(f"{served.url}/pause?mode=keep", timeout=60).ok
        with pytest.raises(RefitError, match="the answer was lost"):
            served.client.refit(served.version + 1)
        assert served.paused
        with pytest.raises(EngineDirty):
            served.client.require_servable()
        assert served.post("resume").ok
    else:
        served.version += 1
        sending = served.trainers.start("refit", MODEL, 1, served.version)
        with pytest.raises(RefitError, match="the answer was lost"):
            served.client.refit(served.version)
        assert all(isinstance(record, dict) for record in sending.result())
        assert not served.paused
        served.client.require_servable()
    monkeypatch.undo()
    served.refit_with(0)
    served.client.require_servable()


def test_an_update_that_was_opened_and_brought_nothing_is_opened_again(served: Served):
    """With replicas, one may have refused while another opened it."""
    tokens = served.complete(LONG_PROMPT)
    assert served.post("start_weight_update").ok
    served.refit_with(1)
    assert served.complete(LONG_PROMPT) != tokens


def test_a_refused_update_leaves_the_server_running_with_the_older_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch, asked: Callable[..., None]
):
    tokens = served.complete(LONG_PROMPT)
    asked("/update_weights", lambda path, fields: (path, {"update_info": {}}))
    with pytest.raises(RefitError, match=r"POST /update_weights with 500.*version"):
        served.client.refit(served.version + 1)
    monkeypatch.undo()
    served.client.require_servable()
    assert served.complete(LONG_PROMPT) == tokens
    served.refit_with(0)
    assert served.complete(LONG_PROMPT) != tokens


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_refit_that_fails_before_a_byte_leaves_the_server_running_if_all_workers_tell(
    served: Served, replicas: int, monkeypatch: pytest.MonkeyPatch
):
    """vLLM tells the version of the first of its data-parallel replicas alone; this one has two as far as it tells."""
    tokens = served.complete(LONG_PROMPT)
    ask = HttpCalls.ask

    def counted(self: HttpCalls, method: str, path: str, *args: Any, **how: Any) -> HttpAnswer:
        answer = ask(self, method, path, *args, **how)
        return HttpAnswer(200, {"world_size": replicas}) if path == "/get_world_size" else answer

    monkeypatch.setattr(HttpCalls, "ask", counted)
    sending = served.trainers.start("refit", MODEL, 1, served.version + 7)
    with pytest.raises(RefitMismatch) as failed:
        served.client.refit(served.version + 1)
    assert all("RefitMismatch" in answer for answer in sending.result())
    assert failed.value.stage.startswith("begin")
    assert served.paused == (replicas == 2)
    if served.paused:
        with pytest.raises(EngineDirty):
            served.client.require_servable()
    else:
        assert served.complete(LONG_PROMPT) == tokens
    served.meet()
    served.refit_with(1)
    assert served.complete(LONG_PROMPT) != tokens
    served.refit_with(0)


def test_a_trainer_rank_that_refuses_leaves_the_server_serving_what_it_has_and_its_record_tells(
    served: Served,
):
    served.refit_with(1)
    assert "failed_attempt" not in served.client.records()[0]
    tokens = served.complete(LONG_PROMPT)
    served.trainers.do("refuse_next", MODEL)
    sending = served.trainers.start("refit", MODEL, 0, served.version + 1)
    with pytest.raises(PeerLost, match="as it was") as failed:
        served.client.refit(served.version + 1)
    assert (failed.value.blamed, len(sending.result())) == (1, RANKS)
    assert not served.paused
    assert served.client.version == served.version
    assert served.probe("refit_parameter_digests") == served.digests[1]
    assert served.complete(LONG_PROMPT) == tokens
    for client in (served.client, RefitClient(served.url)):
        [told] = client.records()
        attempt = told["failed_attempt"]
        assert (told["version"], attempt["version"]) == (served.version, served.version + 1)
        assert (attempt["type"], attempt["blamed"], attempt["rank"]) == ("PeerLost", 1, RANKS)
        assert attempt["stage"] == failed.value.stage
        assert attempt["text"] in str(failed.value)
    served.meet()
    served.refit_with(0)
    assert "failed_attempt" not in served.client.records()[0]


def test_a_refit_that_fails_after_a_byte_leaves_the_server_paused_until_the_next_one(served: Served):
    served.probe("probe_fail_next")
    with pytest.raises(PeerLost, match=r"stays paused.*join_refit") as failed:
        served.client.refit(served.version + 1)
    found = failed.value
    assert (found.stage, found.rank, found.blamed) == ("transfer", RANKS, 1)
    assert served.paused
    for client in (served.client, RefitClient(served.url)):
        with pytest.raises(EngineDirty):
            client.require_servable()
        with pytest.raises(EngineDirty):
            assert client.version
    served.meet()
    served.refit_with(1)
    served.client.require_servable()
    served.refit_with(0)


def test_requests_that_are_waited_for_in_vain_go_on_with_the_older_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = served.undisturbed
    ask = HttpCalls.ask

    def hurried(self: HttpCalls, method: str, path: str, fields: Any = None, **how: Any) -> HttpAnswer:
        return ask(
            self, method, path, fields, **how | ({"timeout_s": 0.1} if path.startswith("/pause") else {})
        )

    monkeypatch.setattr(HttpCalls, "ask", hurried)
    so_far, whole = served.begin(MANY)
    with pytest.raises(RefitTimeout, match="as it was"):
        served.client.refit(served.version + 1, mode="wait")
    assert len(so_far) < MANY
    assert served.end(whole) == undisturbed
    assert not served.paused
    served.refit_with(1)
    served.refit_with(0)


def test_what_a_server_can_not_do_is_refused_before_anything_is_asked(served: Served):
    with pytest.raises(RefitError, match="keep, wait, abort") as refused:
        served.client.refit(served.version + 1, mode="retract")
    assert refused.value.stage == "settings"
    with pytest.raises(RefitError, match="join_refit"):
        RefitClient(served.url).refit(served.version + 1)
    # Requests to a server name the base model, and it would answer them as the version that the adapter has.
    server = open_rendezvous("127.0.0.1", 1, 1)
    trainer = join(server, 0)
    with pytest.raises(RefitError, match="adapter") as refused:
        RefitClient(served.url).join_refit(server.rendezvous.to_json(), 1, RefitConfig(lora="adapter"))
    assert refused.value.stage == "settings"
    with pytest.raises(PeerLost) as heard:
        trainer.barrier("ready")
    assert heard.value.blamed == 1
    trainer.close()
    server.close()
    with pytest.raises(RefitError, match="neither vLLM's nor SGLang's"):
        RefitClient(f"{served.url}/v1/models")
    assert not served.paused


def test_a_server_that_was_restarted_is_met_anew(served: Served):
    served.refit_with(1)
    tokens = served.complete(PROMPT)
    served.running.close()
    with pytest.raises(RefitError, match="did not answer") as lost:
        served.client.refit(served.version + 1)
    assert lost.value.stage == "http"
    served.restart()
    with pytest.raises(RefitError, match="join_refit") as unmet:
        served.client.refit(served.version + 1)
    assert unmet.value.stage == "handshake"
    served.client.require_servable()
    assert served.client.version == -1
    served.meet()
    served.refit_with(1)
    assert served.complete(PROMPT) == tokens


@pytest.mark.parametrize(
    "instead_of", ["update_weights", pytest.param("refit_serving_version", marks=pytest.mark.full)]
)
def test_an_engine_that_ends_instead_of_an_answer_is_noticed_at_once(
    served: Served, asked: Callable[..., None], monkeypatch: pytest.MonkeyPatch, instead_of: str
):
    """The last of this server. vLLM leaves such a call without an answer."""
    if instead_of == "refit_serving_version":
        served.restart()  # it has ended instead of the other answer
        served.version = -1
        served.meet()
        asked("/update_weights", lambda path, fields: (path, {"update_info": {}}))
    served.probe("probe_end_the_engine_instead_of", instead_of)
    begun = time.monotonic()
    with pytest.raises(RefitError, match=r"POST /(refit|update_weights) with 500.*stays paused"):
        served.client.refit(served.version + 1)
    assert time.monotonic() - begun < sum(server._AFTERWARDS_S) / 2


def test_a_server_that_cannot_be_refitted_is_told_how_to_start(checkpoints: tuple[str, str]):
    url = f"http://127.0.0.1:{free_port()}"
    with (
        serving(checkpoints[0], url),
        pytest.raises(RefitError, match="--weight-transfer-config") as refused,
    ):
        RefitClient(url)
    assert refused.value.stage == "start"


def test_a_server_without_development_mode_is_told_how_to_start(
    checkpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    url = f"http://127.0.0.1:{free_port()}"
    with (
        running(url, "version", serve_routes, ["--model", checkpoints[0]], int(url.rpartition(":")[2])),
        pytest.raises(RefitError, match="VLLM_SERVER_DEV_MODE=1") as refused,
    ):
        RefitClient(url)
    assert refused.value.stage == "start"
