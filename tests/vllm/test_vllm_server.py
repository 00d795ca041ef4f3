"""``vllm serve``, refitted over HTTP by the calls that docs/vllm.md shows, with requests in flight."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm_checkpoints import dense_config, write_checkpoint
from vllm_trainers import CONFIG, RANKS, Trainers

from rlrefit.integration.config import RefitConfig
from tests.spawn import free_port
from tests.vllm_processes import vllm_processes

pytestmark = pytest.mark.timeout(400)

MODEL = "qwen3"
PROMPT = [5, 17, 33, 90]
# Fills whole blocks of the KV cache, so that its prefix is kept for the next request.
LONG_PROMPT = [3 + i % 100 for i in range(200)]
# Enough of them that the request runs until it is paused, or for as long as a test needs that does not pause it.
TOKENS, MANY, SHORT = 160, 450, 24
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def _serve(arguments: list[str]) -> None:
    """What ``vllm serve`` does with its arguments."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    found = command.subparser_init(FlexibleArgumentParser().add_subparsers()).parse_args(arguments)
    command.validate(found)
    command.cmd(found)


@dataclass
class Served:
    """A server with weights A, its trainer, and the two functions of docs/vllm.md for it."""

    url: str
    trainers: Trainers
    paths: tuple[str, str]
    meet: Callable[[dict[str, Any], int, RefitConfig], None]
    refit: Callable[[int], None]
    pool: ThreadPoolExecutor
    version: int = -1

    def post(self, route: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(f"{self.url}/{route}", json=body or {}, timeout=200)

    def probe(self, method: str, *args: str) -> Any:
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

    def begin(self, tokens: int = TOKENS) -> tuple[list[int], Future[list[int]]]:
        """A request that has given its first tokens and has many to go: those so far, and all of them at its end."""
        so_far: list[int] = []
        whole = self.pool.submit(self.stream, PROMPT, tokens, so_far)
        while len(so_far) < 4 and not whole.done():
            time.sleep(0.002)
        assert len(so_far) < tokens
        return so_far, whole

    def refit_with(self, index: int) -> None:
        """By the page's function; the trainer takes on A (0) or B (1) and sends it."""
        self.version += 1
        sending = self.trainers.start("refit", MODEL, index, self.version)
        self.refit(self.version)
        assert all(isinstance(record, dict) for record in sending.result())


def _wait_until_it_serves(url: str, process: Any) -> None:
    while process.is_alive():
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.1)
    raise AssertionError(f"vllm serve ended with exit code {process.exitcode}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("checkpoints")
    found = [str(write_checkpoint(root / f"seed-{seed}", dense_config(), seed)) for seed in (1, 2)]
    words = models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0")
    for path in found:
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path)
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert (
        "VLLM_SERVER_DEV_MODE=1 vllm serve" in page
    )  # without that variable vLLM answers the routes with 404
    [block] = re.findall(r"```python\n(import requests\n.*?)```", page, re.DOTALL)
    url = f"http://127.0.0.1:{free_port()}"
    shown: dict[str, Any] = {"url": url}
    exec(block, shown)
    arguments = [
        *(found[0], "--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
        *("--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"),
        *("--worker-extension-cls", "vllm_probe.ProbeExtension"),
        *("--weight-transfer-config", '{"backend": "rlrefit"}'),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
    ]
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Trainers({MODEL: found})) as trainers,
        ThreadPoolExecutor(1) as pool,
    ):
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        process = vllm_processes().Process(target=_serve, args=(arguments,))
        process.start()
        try:
            _wait_until_it_serves(url, process)
            started = Served(url, trainers, (found[0], found[1]), shown["meet"], shown["refit"], pool)
            rendezvous = trainers.do("open", MODEL, 1)[0]
            joining = trainers.start("join", MODEL, rendezvous)
            started.meet(rendezvous, RANKS, RefitConfig(**CONFIG))
            joining.result()
            yield started
            trainers.do("close", MODEL)
        finally:
            process.terminate()
            process.join(30)
            process.kill()


def test_a_busy_server_that_was_not_paused_refuses_an_update_and_goes_on(served: Served):
    undisturbed = served.complete(PROMPT, MANY)
    so_far, whole = served.begin(MANY)
    for route, body in {"start_weight_update": {}, "update_weights": {"update_info": {"version": 0}}}.items():
        refused = served.post(route, body)
        assert len(so_far) < MANY
        assert refused.status_code == 500
        assert "POST /pause?mode=keep" in refused.text
    assert whole.result() == undisturbed


@pytest.mark.parametrize("clears", [True, False], ids=["as the page shows", "paused with its caches kept"])
def test_a_request_in_flight_and_those_after_it_get_the_new_weights_alone(
    served: Served, clears: bool, monkeypatch: pytest.MonkeyPatch
):
    """Twice there and back; what keeps its caches while it is paused has old keys and values of the request."""
    if not clears:
        post = requests.post
        monkeypatch.setattr(
            requests,
            "post",
            lambda url, **how: post(url.replace("mode=keep", "mode=keep&clear_cache=false"), **how),
        )
    old, old_long = served.complete(PROMPT, TOKENS), served.complete(LONG_PROMPT)
    for index in (1, 0):
        so_far, whole = served.begin()
        served.refit_with(index)
        assert len(so_far) < TOKENS
        assert served.probe("refit_serving_version") == {"version": served.version}
        tokens = whole.result()
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


def test_an_update_that_was_opened_and_brought_nothing_is_opened_again(served: Served):
    """With replicas, one may have refused while another opened it."""
    tokens = served.complete(LONG_PROMPT)
    assert served.post("start_weight_update").ok
    served.refit_with(1)
    assert served.complete(LONG_PROMPT) != tokens


def test_a_refused_update_leaves_the_server_running_with_the_older_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    tokens = served.complete(LONG_PROMPT)
    post = requests.post

    def without_version(url: str, **how: Any) -> requests.Response:
        return post(url, **(how | {"json": {"update_info": {}}} if url.endswith("update_weights") else how))

    monkeypatch.setattr(requests, "post", without_version)
    with pytest.raises(requests.HTTPError, match="500"):
        served.refit(served.version + 1)
    monkeypatch.undo()
    assert not requests.get(f"{served.url}/is_paused", timeout=60).json()["is_paused"]
    assert served.complete(LONG_PROMPT) == tokens
    served.refit_with(0)
    assert served.complete(LONG_PROMPT) != tokens
