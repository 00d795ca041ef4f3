"""Payloads of CUDA IPC handles between two processes on one GPU, into TensorRT-LLM's double."""

from __future__ import annotations

import multiprocessing as mp
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.trtllm.driver import TrtllmDriver
from rlrefit.workers.engines.trtllm.sender import TrtllmSender
from tests.trtllm.engine_double import DoubleLLM, expected
from tests.trtllm.package_double import get_device_uuid, modules_of
from tests.trtllm.serialization_double import GENERATIONS
from tests.trtllm.sources import ListSource, some_weights

from .needs import needs

pytestmark = needs()

_BUCKET_BYTES = 1 << 20


class _OnGpu(ListSource):
    """Weights of which some are live parameters on the GPU, and some lie in host memory."""

    device = torch.device("cuda", 0)

    def change(self, seed: int) -> None:
        for i, (name, tensor) in enumerate(some_weights(seed, layers=8).items()):
            self.weights[name] = tensor if i % 3 else tensor.cuda()


def _engine(generation: str, specs: list[TensorSpec], pipe: Connection) -> None:
    import sys

    sys.modules.update(modules_of(generation))
    from rlrefit.workers.engines.trtllm.extension import (
        TrtllmRefit,  # with nothing approved beside its own imports
    )

    llm = DoubleLLM(TrtllmRefit, specs, device="cuda")
    torch.cuda.set_device(0)
    while True:
        method, args = pickle.loads(pipe.recv_bytes())
        if method == "stop":
            return
        if method == "allocated":
            answer: list[Any] = [torch.cuda.memory_allocated()]
        else:
            answer = llm._collective_rpc(method, args, non_block=True)
        pipe.send_bytes(pickle.dumps(answer))


class _Llm:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Any]:
        self._pipe.send_bytes(pickle.dumps((method, args)))
        return [self]

    def answers(self, timeout_s: float) -> list[Any]:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        found: list[Any] = pickle.loads(self._pipe.recv_bytes())
        return found

    def ask(self, method: str) -> Any:
        (found,) = self._collective_rpc(method)[0].answers(60)
        return found


@pytest.fixture
def source() -> _OnGpu:
    found = _OnGpu({})
    found.change(seed=0)
    return found


@pytest.fixture(params=list(GENERATIONS))
def llm(request: pytest.FixtureRequest, source: _OnGpu) -> Iterator[_Llm]:
    ours, theirs = mp.get_context("spawn").Pipe()
    engine = mp.get_context("spawn").Process(
        target=_engine, args=(request.param, source.specs(), theirs), daemon=True
    )
    engine.start()
    yield _Llm(ours)
    ours.send_bytes(pickle.dumps(("stop", ())))
    engine.join(30)
    assert engine.exitcode == 0


def test_twenty_changed_refits_land_bit_for_bit_in_flat_memory(source: _OnGpu, llm: _Llm) -> None:
    driver = TrtllmDriver(llm, wait=lambda futures, timeout_s: futures[0].answers(timeout_s))
    sender = TrtllmSender(source, driver, get_device_uuid(0), _BUCKET_BYTES)
    allocated = set()
    reserved = set()
    for version in range(20):
        source.change(seed=version)
        record = sender.refit(version)
        assert llm.ask("held") == expected(source.weights)
        assert 0 < record.peak_extra_bytes <= _BUCKET_BYTES
        torch.cuda.synchronize()
        if version >= 4:  # allocators have settled
            allocated.add(llm.ask("allocated"))
            reserved.add(torch.cuda.memory_reserved())
    assert driver.version == 19
    assert len(allocated) == len(reserved) == 1


def test_a_gpu_is_called_as_tensorrt_llm_calls_it() -> None:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert own_device() == f"GPU-{properties.uuid}"
