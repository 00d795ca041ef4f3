"""vLLM's own asynchronous scheduler, when running requests give up what was computed with old weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_checkpoints import dense_config

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.driver import EXTENSION
from rlrefit.workers.engines.vllm.patches import (
    _discards_by_flag,
    keep_tokens_of_preempted_requests,
    prepare_cores,
    require_kept_tokens,
)

BLOCKS = 100


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    # With its architecture, or vLLM looks for one in a process of its own.
    dense_config(architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256)
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM turns off on the CPU
    config.cache_config.num_gpu_blocks = BLOCKS
    config.parallel_config.worker_extension_cls = EXTENSION
    return config


class _Run:
    """One request; the model's tokens are 1, 2, 3, … and at most two steps are in flight, as in vLLM's engine."""

    def __init__(self, config: Any) -> None:
        size = config.cache_config.block_size
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            log_stats=False,
        )
        parameters = SamplingParams(max_tokens=12, ignore_eos=True)
        self.request = Request("0", [7, 8, 9], parameters, None)
        self.scheduler.add_request(self.request)
        self._flying: list[Any] = []
        self._sampled = 0

    @property
    def tokens(self) -> list[int]:
        return list(self.request.output_token_ids)

    def steps(self, count: int) -> None:
        for _ in range(count):
            step = self.scheduler.schedule()
            assert step.total_num_scheduled_tokens
            self._sampled += 1
            output = ModelRunnerOutput(
                req_ids=["0"], req_id_to_index={"0": 0}, sampled_token_ids=[[self._sampled]]
            )
            self._flying.append((step, output))
            if len(self._flying) == 2:
                self._land()

    def drain(self) -> None:
        while self._flying:
            self._land()

    def preempt(self) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _land(self) -> None:
        self.scheduler.update_from_output(*self._flying.pop(0))


def _preempted_while_paused(config: Any, times: int) -> _Run:
    run = _Run(config)
    run.steps(4)
    run.drain()
    for _ in range(times):
        run.preempt()
    run.steps(5)
    run.drain()
    return run


def test_a_request_that_is_preempted_while_paused_loses_no_token(config: Any):
    keep_tokens_of_preempted_requests()
    run = _preempted_while_paused(config, times=2)
    assert run.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert run.request.num_output_placeholders == 0


def test_a_token_that_is_in_flight_is_still_discarded_and_computed_again(config: Any):
    keep_tokens_of_preempted_requests()
    run = _Run(config)
    run.steps(4)
    assert run.tokens == [1, 2, 3]
    run.preempt()
    run.steps(3)
    run.drain()
    assert run.tokens == [1, 2, 3, 5, 6, 7]


def test_without_the_plug_in_an_asynchronous_scheduler_that_loses_tokens_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
):
    keep_tokens_of_preempted_requests()
    require_kept_tokens(config)
    bare = getattr(Executor.__init__, "__wrapped__", Executor.__init__)
    monkeypatch.setattr(Executor, "__init__", bare)
    monkeypatch.setattr(AsyncScheduler, "reset_prefix_cache", AsyncScheduler.__mro__[1].reset_prefix_cache)
    tokens = _preempted_while_paused(config, times=1).tokens
    if tokens == [*range(1, 10)]:  # a vLLM that counts the tokens in flight
        require_kept_tokens(config)
        return
    assert tokens == [1, 2, 3, 4, 6, 7, 8, 9]
    with pytest.raises(RefitError, match="VLLM_PLUGINS"):
        require_kept_tokens(config)
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", False)
    require_kept_tokens(config)


def test_a_client_with_the_plug_in_knows_that_its_core_keeps_tokens(
    config: Any, monkeypatch: pytest.MonkeyPatch
):
    bare = AsyncScheduler.__mro__[1].reset_prefix_cache
    monkeypatch.setattr(AsyncScheduler, "reset_prefix_cache", bare)
    prepare_cores()
    require_kept_tokens(config)
    if _discards_by_flag():
        assert AsyncScheduler.reset_prefix_cache is not bare


def test_the_scheduler_of_an_engine_without_rlrefit_is_left_as_it_is(
    config: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config.parallel_config, "worker_extension_cls", "")
    original = AsyncScheduler.__mro__[1].reset_prefix_cache
    keep_tokens_of_preempted_requests()
    patched = _preempted_while_paused(config, times=1).tokens
    monkeypatch.setattr(AsyncScheduler, "reset_prefix_cache", original)
    assert patched == _preempted_while_paused(config, times=1).tokens
