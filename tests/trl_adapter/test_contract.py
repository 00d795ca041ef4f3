"""What the trainer needs of TRL and of accelerate, and how it is refused where that is missing."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.workers.frameworks.trl.contract import TESTED, UnsupportedTrl, require_supported, violations
from rlrefit.workers.frameworks.trl.transfer import ShardOptions, ShardTransfer

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="needs TRL, which verl can't have beside it: make test-trl",
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module, or a double of it that has less."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo import async_grpo_trainer

    return async_grpo_trainer


@needs_trl
def test_the_installed_release_has_all(published: Any):
    assert violations(published) == []


@needs_trl
@pytest.mark.parametrize(
    ("kind", "method", "told"),
    [
        ("AsyncGRPOTrainer", "_sync_weight_merged", "there is no AsyncGRPOTrainer._sync_weight_merged"),
        ("VLLMClient", "wait_for_server_ready", "there is no VLLMClient.wait_for_server_ready"),
    ],
)
def test_a_release_that_lacks_a_method_is_refused_with_its_name(
    published: Any, kind: str, method: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(getattr(published, kind), method)
    with pytest.raises(UnsupportedTrl, match=told) as refused:
        require_supported(published)
    assert TESTED in str(refused.value)


@needs_trl
def test_a_release_that_syncs_in_another_way_is_refused_with_all_that_differs(
    published: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(published.AsyncGRPOTrainer, "_sync_weight", lambda self: None)
    monkeypatch.setattr(published.AsyncGRPOTrainer, "_sync_weight_merged", lambda self, begun, mode: None)
    monkeypatch.setattr(published.WeightTransferProtocol, "flush", lambda self: None, raising=False)
    assert violations(published) == [
        "AsyncGRPOTrainer._sync_weight_merged takes (self, begun, mode), not (self, t0)",
        "AsyncGRPOTrainer._sync_weight knows no _lora_sync, _sync_weight_merged",
        "WeightTransferProtocol asks for flush",
    ]


def test_a_module_that_has_nothing_is_refused_with_a_sentence_for_each_thing():
    assert len(violations(SimpleNamespace())) == 6


class _Answers(BaseHTTPRequestHandler):
    """What a meeting asks of a vLLM server; its dtype is the first of ``dtypes``."""

    dtypes: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        config = {"vllm_config": {"model_config": {"dtype": self.dtypes[0]}}}
        body = json.dumps({"version": "0", "world_size": 1, "result": [], **config}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Of one process on the CPU; none stays for other tests."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("given", "met"),
    [(None, [torch.bfloat16, torch.float16]), (torch.float32, [torch.float32, torch.float32])],
)
def test_a_server_is_asked_for_its_dtype_at_each_meeting_unless_one_is_given(
    given: torch.dtype | None,
    met: list[torch.dtype],
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_Answers, "dtypes", ["torch.bfloat16"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    trainer = SimpleNamespace(
        accelerator=accelerator,
        model=torch.nn.Linear(4, 3),
        model_version=0,
        vllm_client=SimpleNamespace(
            server_url=f"http://127.0.0.1:{server.server_port}", wait_for_server_ready=lambda: None
        ),
    )
    transfer = ShardTransfer(trainer, ShardOptions(dtype=given))
    found = []
    monkeypatch.setattr(transfer, "_with_server", lambda *_: found.append(transfer.refit_dtype) or {})
    transfer.update(lambda: None)
    _Answers.dtypes[0] = "torch.float16"
    transfer.update(lambda: None)  # no session has come to be, so they meet once more
    server.shutdown()
    server.server_close()
    transfer.close_refit()
    assert found == [dtype for dtype in met for _ in ("join", "refit")]


def _transfer(
    kind: DistributedType, options: ShardOptions | None = None, is_fsdp2: bool = True
) -> ShardTransfer:
    accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2)
    return ShardTransfer(SimpleNamespace(accelerator=accelerator), options or ShardOptions())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedType.DEEPSPEED, "DEEPSPEED"),
        (DistributedType.MEGATRON_LM, "MEGATRON_LM"),
        (DistributedType.FSDP, "FSDP1"),
    ],
)
def test_ranks_whose_modules_do_not_have_their_weights_are_refused_by_name(kind: DistributedType, name: str):
    with pytest.raises(RefitError, match=name) as refused:
        _transfer(kind, is_fsdp2=False).require_served()
    assert refused.value.stage == "settings"


def test_all_that_is_wrong_with_the_options_is_told_at_once():
    refit = RefitConfig.unchecked(
        bucket_mb=0, lora="adapter", kv_scales=True, delta="auto", delta_base="optimizer"
    )
    with pytest.raises(RefitError) as refused:
        _transfer(DistributedType.DEEPSPEED, ShardOptions(refit)).require_served()
    for wrong in ("bucket_mb", "refit.lora", "refit.kv_scales", "refit.delta_base", "DEEPSPEED"):
        assert wrong in str(refused.value)
