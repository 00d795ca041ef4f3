"""What the adapter of vLLM checks before it calls vLLM; with a real engine in ``tests/vllm``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.colocated import VllmSleeper
from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver


def driver(*, sleep_mode: bool, device: str, busy: bool = False) -> VllmDriver:
    """Of an ``LLM`` that has what the driver asks, and writes down what it is told."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        device_config=SimpleNamespace(device_type=device),
        weight_transfer_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION),
    )
    engine = SimpleNamespace(vllm_config=config, has_unfinished_requests=lambda: busy)
    told: list[Any] = []
    llm = SimpleNamespace(
        llm_engine=engine,
        told=told,
        collective_rpc=lambda method, args: [{"asleep": ["kv_cache"]}],
        sleep=lambda level: told.append(level),
        wake_up=lambda tags: told.append(tags),
    )
    return VllmDriver(llm)


def test_an_engine_without_sleep_mode_is_refused_on_a_gpu() -> None:
    VllmSleeper([driver(sleep_mode=True, device="cuda"), driver(sleep_mode=False, device="cpu")])
    with pytest.raises(RefitError, match="engine 1 was started without enable_sleep_mode"):
        VllmSleeper([driver(sleep_mode=True, device="cuda"), driver(sleep_mode=False, device="cuda")])


def test_no_engine_sleeps_where_one_has_unfinished_requests() -> None:
    idle, busy = driver(sleep_mode=True, device="cuda"), driver(sleep_mode=True, device="cuda", busy=True)
    with pytest.raises(StageRefused, match="engine 1 has unfinished requests"):
        VllmSleeper([idle, busy]).sleep(2)
    assert not idle._llm.told
    VllmSleeper([idle]).sleep(2)
    assert idle._llm.told == [2]


@pytest.mark.parametrize(
    ("tags", "why"),
    [(["weights"], "weights is awake already"), (["kv_cache", "cuda_graph"], "it knows no cuda_graph")],
)
def test_a_wake_up_that_vllm_would_pass_over_is_refused(tags: list[str], why: str) -> None:
    half = driver(sleep_mode=True, device="cuda")
    with pytest.raises(StageRefused, match=why):
        VllmSleeper([half]).wake(tags)
    assert not half._llm.told
    VllmSleeper([half]).wake(["kv_cache"])
    assert half._llm.told == [["kv_cache"]]
