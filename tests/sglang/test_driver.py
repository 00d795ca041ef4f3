"""Refits of SGLang engines in each of the three ways to them, over a double with the ways in which the real one fails."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.stages import StageError, StageRefused
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, RefitError, RefitTimeout
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.workers.engines.common.guard import WeightsGuard, call_before
from rlrefit.workers.engines.sglang.callers import Answer, EngineCaller, HttpCaller, Step
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER, load, refusing, serving

from .engine_double import EngineDouble, Holder, ManagerDouble, equal, weights
from .recorded import VERSION
from .ways import WAYS, Sending, Work, blocking, over_http

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


pytestmark = pytest.mark.usefixtures("sglang")


def _two_refits_in_buckets(engine: EngineDouble) -> Work:
    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        for version, index in enumerate((1, 2)):
            assert sending.bring(version, index).bytes_misc == sending.source.kept_bytes
            assert (refit.version, refit.weight_version()) == (version, str(version))

    return work


def _two_refits_shard_to_shard(engine: EngineDouble) -> Work:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        source, server = Holder(0), open_rendezvous("127.0.0.1", 1, 1)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(RefitSession.open, server.rendezvous, 0, lambda: source, CONFIG)
            refit.init_refit(server.rendezvous.to_json(), 1, CONFIG)
            session = joining.result()
            for version, index in enumerate((1, 2)):
                source.take_on(index)
                manager.holder.poison()
                sending = pool.submit(session.refit, version)
                [record] = refit.refit(version)
                sending.result()
                assert record["bytes_bulk"] == source.kept_bytes
                assert equal(manager.holder.held, weights(index))
                assert (refit.version, refit.weight_version()) == (version, str(version))
                assert not manager.paused
            refit.close_refit()
            session.close()
        server.close()

    return work


def _two_cycles(engine: EngineDouble, multi_stage: bool) -> Work:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        cycle = sending.cycle(multi_stage_wake_up=multi_stage)
        for version, index in enumerate((1, 2)):
            cycle.to_training()
            assert manager.asleep == {"weights", "kv_cache"}
            with pytest.raises(StageError):
                cycle.wake_kv_cache()
            sending.turn(cycle, version, index)
            assert not manager.asleep

    return work


def test_two_refits_in_buckets(engine: EngineDouble, through: Any) -> None:
    through(engine, _two_refits_in_buckets(engine))


def test_two_refits_shard_to_shard(engine: EngineDouble, through: Any) -> None:
    through(engine, _two_refits_shard_to_shard(engine))


@pytest.mark.parametrize("multi_stage", [True, False], ids=["in stages", "at once"])
def test_two_cycles_of_memory_stages(engine: EngineDouble, through: Any, multi_stage: bool) -> None:
    through(engine, _two_cycles(engine, multi_stage))


@pytest.mark.parametrize(
    "scene",
    [_two_refits_in_buckets, _two_refits_shard_to_shard, lambda engine: _two_cycles(engine, True)],
    ids=["buckets", "shard to shard", "stages"],
)
def test_all_ways_take_the_same_steps(scene: Callable[[EngineDouble], Work]) -> None:
    taken = []
    for through in WAYS.values():
        engine = EngineDouble()
        through(engine, scene(engine))
        taken.append(engine.tokenizer_manager.calls)
        engine.loop.close()
    assert taken[0] == taken[1] == taken[2]
    assert taken[0].count("update_weight_version") == 2


def test_the_cache_is_flushed_once_after_the_last_bucket(engine: EngineDouble) -> None:
    blocking(engine, _two_refits_in_buckets(engine))
    calls = engine.tokenizer_manager.calls
    first, last = calls.index("bucket"), calls.index("commit")
    assert calls[first:last].count("bucket") > 1
    assert "flush_cache" not in calls[first:last]
    assert calls[last + 1] == "flush_cache"


def test_running_requests_are_waited_for_and_not_forever(engine: EngineDouble, through: Any) -> None:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        manager.running = 1
        with pytest.raises(RefitTimeout, match="did not all end"):
            Sending(refit, engine).sender.refit(0)
        assert equal(manager.holder.held, weights(0))
        assert not manager.paused

    through(engine, work)


def test_a_sleep_under_requests_is_refused_and_does_not_end_the_scheduler(
    engine: EngineDouble, through: Any
) -> None:
    def work(refit: SglangRefit) -> None:
        engine.tokenizer_manager.running = 1
        with pytest.raises(StageRefused, match="unfinished requests"):
            refit.sleep()
        assert not refit.asleep()

    through(engine, work)
    assert not engine.tokenizer_manager.paused


def test_an_idle_engine_is_paused_and_then_looked_at_once(engine: EngineDouble) -> None:
    refit, calls = SglangRefit(EngineCaller(engine)), engine.tokenizer_manager.calls
    for version in (0, 1):
        calls.clear()
        refit.begin(version, Holder(0).specs())
        assert calls == ["pause in_place", "flush_cache", "begin"]
        refit.commit(version)


def test_a_batch_that_is_on_its_way_out_is_waited_for_while_the_engine_goes_on(
    engine: EngineDouble, through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = engine.tokenizer_manager
    flush = manager.flush_cache

    async def flushed(timeout_s: float | None = None) -> Any:
        if timeout_s and not manager.paused:
            manager.running = 0
        return await flush(timeout_s)

    def work(refit: SglangRefit) -> None:
        manager.running = 1
        refit.sleep()

    monkeypatch.setattr(manager, "flush_cache", flushed)
    through(engine, work)
    assert manager.asleep == {"weights", "kv_cache"}
    assert manager.calls.count("continue") == 1
    assert not manager.running


def test_another_loader_of_the_engine_adds_commands_to_its_workers(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager
    asked: list[Any] = []

    def work(refit: SglangRefit) -> None:
        update = manager.update_weights_from_tensor

        async def called(obj: Any, request: Any) -> tuple[bool, str]:
            if obj.load_format == LOADER:
                return await update(obj, request)
            asked.append((obj.load_format, pickle.loads(base64.b64decode(obj.serialized_named_tensors[0]))))
            manager.worker.count = lambda first: {"count": first + 1}  # type: ignore[attr-defined]
            return True, "Success"

        manager.update_weights_from_tensor = called  # type: ignore[method-assign]
        with pytest.raises(RefitError, match="count"):
            refit.calls.ask("count", 4)
        refit.calls.extend("package.of.another")
        assert refit.calls.ask("count", 4) == [{"count": 5}]

    through(engine, work)
    assert asked == [("package.of.another", [])]


def test_a_wake_up_that_would_end_the_scheduler_is_refused(engine: EngineDouble) -> None:
    refit = SglangRefit(EngineCaller(engine))
    for tags in (["weights"], [], ["experts"]):
        with pytest.raises(StageRefused, match="Nothing has changed"):
            refit.wake(tags)
    refit.sleep()
    with pytest.raises(StageRefused, match="sleeps already"):
        refit.sleep()
    with pytest.raises(StageRefused, match="Nothing has changed"):
        refit.wake(["weights", "experts"])
    assert refit.asleep() == {"weights", "kv_cache"}


def test_weights_that_a_sleep_discarded_are_not_served(engine: EngineDouble, through: Any) -> None:
    def work(refit: SglangRefit) -> None:
        refit.sleep()
        refit.wake()
        with pytest.raises(EngineDirty, match="discarded"):
            refit.require_servable()
        assert engine.tokenizer_manager.paused
        Sending(refit, engine).bring(0, 2)

    through(engine, work)


def test_level_1_needs_a_backup_and_keeps_the_weights() -> None:
    engine = EngineDouble()
    with pytest.raises(StageRefused, match="enable_weights_cpu_backup"):
        SglangRefit(EngineCaller(engine)).sleep(1)
    backed = EngineDouble(enable_weights_cpu_backup=True)
    refit = SglangRefit(EngineCaller(backed))
    refit.sleep(1)
    refit.wake()
    refit.require_servable()
    assert not backed.tokenizer_manager.paused


def test_a_bucket_that_fails_keeps_the_engine_paused_until_a_refit_succeeds(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager
    manager.fail_bucket = 2

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        with pytest.raises(RefitError, match="discard"):
            sending.sender.refit(0)
        assert manager.paused
        with pytest.raises(EngineDirty, match="paused"):
            refit.require_servable()
        sending.bring(1, 1)

    through(engine, work)


def test_requests_are_retracted_only_where_no_prefix_of_theirs_is_cached(through: Any) -> None:
    cached, plain = EngineDouble(), EngineDouble(disable_radix_cache=True)

    def refused(refit: SglangRefit) -> None:
        cached.tokenizer_manager.running = 2
        with pytest.raises(RefitError, match="disable_radix_cache=True"):
            refit.begin(0, Holder(0).specs(), "retract")
        assert not cached.tokenizer_manager.paused

    def retracted(refit: SglangRefit) -> None:
        plain.tokenizer_manager.running = 2
        refit.begin(0, Holder(0).specs(), "retract")
        assert plain.tokenizer_manager.retracted == 2
        refit.commit(0)
        assert not plain.tokenizer_manager.paused
        assert plain.tokenizer_manager.running == 2

    through(cached, refused)
    through(plain, retracted)


def test_requests_that_are_left_after_a_refit_keep_the_engine_paused_until_they_are_aborted(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        refit.begin(0, Holder(0).specs())
        manager.retracted = 1
        with pytest.raises(RefitError, match="mode='abort'"):
            refit.commit(0)
        assert manager.paused
        with pytest.raises(EngineDirty):
            refit.require_servable()
        refit.begin(1, Holder(0).specs(), "abort")
        refit.commit(1)
        assert not manager.paused
        assert manager.retracted == 0

    through(engine, work)


def test_requests_that_keep_old_keys_are_not_let_through(engine: EngineDouble) -> None:
    refit = SglangRefit(EngineCaller(engine))
    with pytest.raises(RefitError, match="in_place"):
        refit.begin(0, [], "in_place")  # type: ignore[arg-type]


def test_everything_that_is_wrong_with_an_engine_is_told_at_once() -> None:
    engine = EngineDouble(custom_weight_loader=None, pp_size=2, enable_eplb=True, weight_cache_mode="read")
    with pytest.raises(RefitError) as caught:
        SglangRefit(EngineCaller(engine))
    for name in ("custom_weight_loader", "pp_size", "enable_eplb", "weight_cache_mode"):
        assert name in str(caught.value)
    assert engine.tokenizer_manager.calls == []


def test_a_blocking_call_from_a_coroutine_says_what_to_use(engine: EngineDouble) -> None:
    async def scenario() -> None:
        with pytest.raises(RefitError, match="AsyncSglangRefit"):
            SglangRefit(EngineCaller(engine))

    engine.loop.run_until_complete(scenario())


def test_an_engine_that_does_not_answer_is_not_waited_for_forever(engine: EngineDouble) -> None:
    async def silent(obj: Any, request: Any) -> None:
        await asyncio.sleep(60)

    engine.tokenizer_manager.update_weights_from_tensor = silent  # type: ignore[assignment,method-assign]
    with pytest.raises(RefitTimeout, match="update_weights_from_tensor"):
        SglangRefit(EngineCaller(engine, timeout_s=0.1))

    async def scenario() -> None:
        with pytest.raises(RefitTimeout, match="update_weights_from_tensor"):
            await asyncio.to_thread(
                SglangRefit, EngineCaller(engine, asyncio.get_running_loop(), timeout_s=0.1)
            )

    engine.loop.run_until_complete(scenario())


def test_a_blocking_call_beside_the_awaited_ones_is_refused_and_their_own_answer(
    engine: EngineDouble,
) -> None:
    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(engine)
        sender = Sending(refit.blocking, engine).sender
        for version in (3, 4):
            await refit.run(sender.refit, version)
            for call in (
                lambda: refit.blocking.version,
                refit.blocking.weight_version,
                refit.blocking.require_servable,
            ):
                with pytest.raises(RefitError, match="would wait for itself"):
                    call()
            assert (await refit.version(), await refit.weight_version()) == (version, str(version))
            await refit.require_servable()

    engine.loop.run_until_complete(asyncio.wait_for(scenario(), 20))


def test_steps_of_coroutines_have_the_callers_device(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps a device for each thread; here a number that does."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(own, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "device", device))
    torch.cuda.set_device(3)

    async def scenario() -> int:
        refit = await AsyncSglangRefit.open(engine)
        return await refit.run(torch.cuda.current_device)

    assert engine.loop.run_until_complete(scenario()) == 3


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_cancelled_refit_ends_before_the_next_steps_begin(engine: EngineDouble, times: int) -> None:
    order: list[str] = []

    def slow() -> None:
        time.sleep(0.2)
        order.append("first")

    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(engine)
        task = asyncio.ensure_future(refit.run(slow))
        for _ in range(times):
            await asyncio.sleep(0.02)
            task.cancel()
        await refit.run(order.append, "second")
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.loop.run_until_complete(scenario())
    assert order == ["first", "second"]


def test_a_server_that_does_not_answer_or_is_another_one_is_named() -> None:
    with pytest.raises(RefitError, match=r"http://127\.0\.0\.1:9"):
        HttpCaller("http://127.0.0.1:9").call(Step("settings"))
    engine = EngineDouble()
    del engine.tokenizer_manager.server_args.weight_cache_mode
    with pytest.raises(RefitError, match="weight_cache_mode"):
        over_http(engine, lambda refit: None)


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_server_that_dies_before_it_has_answered_is_a_refit_error(begins: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def die() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                connection.recv(65536)
                connection.sendall(begins)
                connection.close()

        threading.Thread(target=die, daemon=True).start()
        way = HttpCaller(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=10)
        for step in (Step("pause_generation", {"mode": "abort"}), Step("weight_version")):
            with pytest.raises(RefitError, match=step.name):
                way.call(step)


def test_the_loader_serves_commands_and_leaves_other_formats_to_sglang() -> None:
    seen: list[Any] = []

    def original(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        seen.append((named_tensors, load_format))
        return True, "Success"

    served = serving(original)
    assert served(None, ["w"], "flattened_bucket") == (True, "Success")
    assert served(None, ["w"]) == (True, "Success")
    assert served(None, [], load_format=LOADER) == (True, "[]")
    assert seen == [(["w"], "flattened_bucket"), (["w"], None)]


def test_another_sglang_is_refused_before_anything_is_asked_of_its_workers(
    engine: EngineDouble, through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.18")
    with pytest.raises(RefitError, match=r"version 0\.5\.18"):
        through(engine, lambda refit: None)
    assert not engine.tokenizer_manager.attached
    monkeypatch.setattr(sys.modules["sglang"], "__version__", f"{VERSION}+local")
    through(engine, lambda refit: None)


def test_a_worker_whose_internals_differ_answers_and_its_scheduler_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def original(self: Any, named_tensors: Any, fmt: str | None = None) -> tuple[bool, str]:
        return True, "Success"

    updater = types.ModuleType("sglang.srt.model_executor.model_runner_components.weight_updater")
    updater.WeightUpdater = type("WeightUpdater", (), {"update_weights_from_tensor": original})  # type: ignore[attr-defined]
    for name in ("sglang.srt.model_executor", "sglang.srt.model_executor.model_runner_components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    load(None, [])  # without a WeightUpdater
    monkeypatch.setitem(sys.modules, updater.__name__, updater)
    load(None, [])
    load(None, [])
    worker = updater.WeightUpdater()
    success, message = worker.update_weights_from_tensor(["w"], LOADER)
    assert not success
    assert "differs from 0.5.17" in message
    assert worker.update_weights_from_tensor(["w"], fmt="flattened_bucket") == (True, "Success")
    assert refusing(original, "why")(None, named_tensors=[], fmt=LOADER) == (False, "why")


def test_workers_that_do_not_serve_are_told_of_with_what_they_say(engine: EngineDouble) -> None:
    async def unserved(obj: Any, request: Any) -> tuple[bool, str]:
        return True, "Success"

    engine.tokenizer_manager.update_weights_from_tensor = unserved  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="Success"):
        SglangRefit(EngineCaller(engine))


class TwoRanks:
    """A way to an engine of two workers, whose second one has the first GPU."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def call(self, step: Step) -> Answer:
        if step.name == "settings":
            return Answer(value=vars(ManagerDouble(tp_size=2).server_args) | {"version": VERSION})
        self.steps.append(step)
        found: list[dict[str, Any]] = [{"device": "GPU-b"}, {"device": "GPU-a"}]
        return Answer(message=json.dumps(found))


def test_payloads_are_given_in_the_order_of_the_workers_ranks_one_for_each() -> None:
    way = TwoRanks()
    refit = SglangRefit(way)
    assert refit.devices == ["GPU-b", "GPU-a"]
    way.steps.clear()
    refit.load({"GPU-a": "of a", "GPU-b": "of b"})
    sent = way.steps[0].fields
    assert sent["serialized_named_tensors"] == ["of b", "of a"]
    assert (sent["load_format"], sent["flush_cache"]) == ("flattened_bucket", False)
    # Until the workers' copies are done, the sender keeps what they read.
    assert (
        json.loads(pickle.loads(base64.b64decode(way.steps[1].fields["serialized_named_tensors"][0]))[0][1])
        == []
    )


def test_a_batch_over_weights_that_are_not_whole_is_stopped() -> None:
    class Runner:
        def forward(self, batch: str) -> str:
            return f"logits of {batch}"

    runner, state = Runner(), ServingState()
    guard = WeightsGuard(state)
    call_before(runner, "forward", lambda *_, **__: guard.require_whole())
    assert runner.forward("a batch") == "logits of a batch"
    state.mark_dirty(3)
    with pytest.raises(EngineDirty, match="refit 3 began"):
        runner.forward("a batch")
    state.commit(3)
    guard.discarded("a level 2 sleep discarded the weights")
    with pytest.raises(EngineDirty, match="level 2"):
        runner.forward("a batch")
    guard.refitted()
    assert runner.forward(batch="b") == "logits of b"
