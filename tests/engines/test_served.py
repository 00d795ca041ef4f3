"""A server of another release, refitted over HTTP in one call; that of ``.venv`` has ``tests/vllm/test_vllm_server.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.engines.common.http_calls import HttpAnswer, HttpCalls
from rlrefit.workers.engines.http_client import RefitClient
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from tests.spawn import free_port
from tests.vllm.vllm_checkpoints import dense_config, write_checkpoint
from tests.vllm_servers import BACKEND, ENVIRONMENT, serving, write_tokenizer

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        Path(sys.prefix).name == ".venv", reason="tests/vllm/test_vllm_server.py has more of this release"
    ),
]

EXTENSION = "rlrefit.workers.engines.vllm.extension.VllmRefitExtension"
PROMPT = [5, 17, 33, 60]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=120.0, verify="full")


@pytest.fixture
def dense(tmp_path: Path) -> list[str]:
    """Heads of a size that vLLM's attention on CPUs has."""
    return [str(write_checkpoint(tmp_path / str(seed), dense_config(), seed)) for seed in (1, 2)]


@pytest.fixture
def url(dense: list[str]) -> Iterator[str]:
    where = f"http://127.0.0.1:{free_port()}"
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        write_tokenizer(dense[0])
        # Without it later releases can't reload what their kernels on CPUs pack.
        with serving(dense[0], where, *BACKEND, "--worker-extension-cls", EXTENSION):
            yield where


def test_a_server_is_refitted_in_one_call_there_and_back(
    url: str, dense: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in dense]

    class Trainer(FSDPRefitMixin):
        model = AutoModelForCausalLM.from_pretrained(dense[0], dtype=torch.bfloat16)
        refit_config = CONFIG
        refit_dtype = torch.bfloat16

    ask, asked = HttpCalls.ask, list[str]()

    def noted(self: HttpCalls, method: str, path: str, *args: Any, **how: Any) -> HttpAnswer:
        asked.append(path)
        return ask(self, method, path, *args, **how)

    def complete() -> list[int]:
        fields = {"model": dense[0], "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
        fields |= {"ignore_eos": True, "return_token_ids": True}
        answer = requests.post(f"{url}/v1/completions", json=fields, timeout=200)
        answer.raise_for_status()
        return list(answer.json()["choices"][0]["token_ids"])

    trainer, client = Trainer(), RefitClient(url)
    rendezvous = trainer.open_refit_rendezvous("127.0.0.1", 1, 1, 0)
    first, tokens = complete(), []
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(client.join_refit, rendezvous, 1, CONFIG)
        trainer.join_refit(rendezvous, 0)
        joining.result()
        monkeypatch.setattr(HttpCalls, "ask", noted)
        for version, index in enumerate((1, 0)):
            with torch.no_grad():
                for own, other in zip(trainer.model.parameters(), models[index].parameters(), strict=True):
                    own.copy_(other)
            asked.clear()
            refitting = pool.submit(client.refit, version)
            trainer.refit(version)
            [record] = refitting.result()
            assert (record["version"], asked) == (version, ["/refit"])
            assert client.version == version
            client.require_servable()
            tokens.append(complete())
        client.close_refit()
    trainer.close_refit()
    assert tokens[0] != first
    assert tokens[1] == first
