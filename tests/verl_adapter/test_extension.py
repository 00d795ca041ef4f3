"""What verl's rollouts hand over to vLLM's worker, by verl's own sender and receiver."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.plugin.platform import platform_manager

from examples.verl.cpu_platform import PlatformCPU
from examples.verl.on_cpus import named_vllm
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.frameworks.verl.orders import ORDER, Order
from tests.refit.synthetic import SyntheticSource

LIMIT_S = 30.0
RECORD = RefitRecord(1, 1, 1, "generation", "nccl_xfer", "golden", 8, 0, 8, 8, 0.1)


class Refit:
    """What a worker's refit is to the extension; its refits commit at once."""

    def __init__(self) -> None:
        self.refit_state = ServingState()
        self.undefined = True
        # Of each epoch that was joined: whether the engine was said to stay awake by then.
        self.joined: list[bool] = []
        self.stays_awake = False
        self.guard = SimpleNamespace(refitted=self.refitted)

    def refitted(self) -> None:
        self.undefined = False

    def join_refit(self, *_: Any) -> None:
        self.joined.append(self.stays_awake)

    def refit(self, version: int) -> dict[str, Any]:
        self.refit_state.commit(version)
        self.refitted()
        return asdict(RECORD)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(named_vllm(tmp_path))
    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())
    from rlrefit.workers.frameworks.verl.extension import VerlRefitExtension

    class Worker(VerlRefitExtension):
        _refit: Any = None
        handle = ""

        def __new__(cls) -> Any:  # verl's own lets the process die with its parent
            return object.__new__(cls)

        def _get_zmq_handle(self) -> str:
            return self.handle

    with tempfile.TemporaryDirectory() as folder:  # short, as a socket's name has to be
        made = Worker()
        made._refit, made.handle = Refit(), f"ipc://{folder}/z"
        made.model_runner = SimpleNamespace(device=torch.device("cpu"))
        yield made


def test_verl_has_its_answer_before_the_refit_begins_and_an_unwritable_record_undoes_no_refit(
    worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    released, commit = threading.Event(), worker._refit.refit

    def refit(version: int) -> dict[str, Any]:
        assert released.wait(LIMIT_S)
        return commit(version)

    worker._refit.refit = refit
    file = tmp_path / "file"
    file.touch()
    order = Order(None, 1, 1, 1, {}, str(file / "refits"))
    thread = threading.Thread(target=worker.update_weights_from_ipc, kwargs={"use_shm": True}, daemon=True)
    thread.start()
    sender = BucketedWeightSender(worker.handle, 1, use_shm=True)
    # As verl's rollout worker does.
    asyncio.run(asyncio.wait_for(sender.async_send_weights(iter([(ORDER, order.to_tensor())])), LIMIT_S))
    assert thread.is_alive()
    released.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert worker._refit.refit_state.version == 1
    assert str(file / "refits") in caplog.text


@pytest.mark.parametrize("base_sync_done", [True, False])
def test_verls_own_hand_over_of_a_whole_model_may_be_served_and_half_of_one_may_not(
    worker: Any, base_sync_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlrefit.workers.frameworks.verl import extension

    refit, breaks = worker._refit, True

    def load(self: Any, **_: Any) -> None:
        with pytest.raises(EngineDirty):
            refit.refit_state.require_clean()
        if breaks:
            raise OSError("the trainer died")

    monkeypatch.setattr(extension.vLLMColocateWorkerExtension, "update_weights_from_ipc", load)
    with pytest.raises(OSError, match="died"):
        worker.update_weights_from_ipc(base_sync_done=base_sync_done)
    with pytest.raises(EngineDirty):
        refit.refit_state.require_clean()
    breaks = False
    # An adapter makes no base model whole.
    monkeypatch.setattr(
        extension.vLLMColocateWorkerExtension, "update_weights_from_ipc", lambda *_, **__: None
    )
    worker.update_weights_from_ipc(peft_config={"r": 8}, base_sync_done=True)
    assert refit.undefined
    monkeypatch.setattr(extension.vLLMColocateWorkerExtension, "update_weights_from_ipc", load)
    worker.update_weights_from_ipc(base_sync_done=base_sync_done)
    refit.refit_state.require_clean()
    assert not refit.undefined


def test_an_order_says_in_each_epoch_whether_the_engine_stays_awake(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlrefit.workers.frameworks.verl import extension

    monkeypatch.setattr(extension, "served_violations", lambda *_: [])
    worker.vllm_config = None
    for stays in (True, False):
        worker._refit_as_ordered(Order({}, 1, 1, 1, {}, None, stays_awake=stays))
    assert worker._refit.joined == [True, False]


def test_an_engine_that_is_quantized_or_speculates_tells_the_actors_why_it_takes_no_part(worker: Any) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = RefitConfig(timeout_s=LIMIT_S)
    worker.vllm_config = SimpleNamespace(
        quant_config=Fp8Config(),
        model_config=SimpleNamespace(model="policy"),
        speculative_config=SimpleNamespace(method="mtp", model="another"),
    )
    spec = TensorSpec("w", (4,), torch.float32)
    source = SyntheticSource([spec], {"w": [((0, 4),)]})
    server = open_rendezvous("127.0.0.1", 1, 1)
    order = Order(server.rendezvous.to_json(), 1, 1, 1, asdict(config), None)
    assert server.rendezvous.token not in repr(order)
    thread = threading.Thread(target=worker._refit_as_ordered, args=(order,), daemon=True)
    thread.start()

    try:
        with pytest.raises(RefitError) as error:
            RefitSession.open(server.rendezvous, 0, lambda: source, config)
    finally:
        server.close()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    for part in ("quantized (fp8", "speculatively (mtp)"):
        assert part in str(error.value)
