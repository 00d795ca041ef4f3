"""Refits of SGLang engines in each of the three ways to them, over a double with the ways in which the real one fails."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.stages import StageError
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.workers.engines.sglang.callers import Answer, EngineCaller, HttpCaller, Step
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER, load, refusing, serving
from tests.refit.meeting import join

from .conftest import Drive
from .engine_double import EngineDouble, Holder, ManagerDouble
from .recorded import VERSION
from .ways import CONFIG, WAYS, Driven, driven_in

pytestmark = pytest.mark.usefixtures("sglang")


@pytest.fixture
def engine(alone: Driven) -> EngineDouble:
    return alone.engine


def _in_buckets(driven: Driven) -> None:
    for version, index in enumerate((1, 2)):
        assert driven.bring(version, index).bytes_misc == driven.source.kept_bytes
    calls = driven.manager.calls
    first, last = calls.index("bucket"), calls.index("commit")
    assert calls[first:last].count("bucket") > 1
    assert "flush_cache" not in calls[first:last], "once after the last bucket"
    assert calls[last + 1] == "flush_cache"


def _shard_to_shard(driven: Driven) -> None:
    with driven.met() as bring:
        for version, index in enumerate((1, 2)):
            bring(version, index)


def _cycles(driven: Driven, multi_stage: bool) -> None:
    cycle = driven.cycle(multi_stage_wake_up=multi_stage)
    for version, index in enumerate((1, 2)):
        cycle.to_training()
        assert driven.manager.asleep == {"weights", "kv_cache"}
        with pytest.raises(StageError):
            cycle.wake_kv_cache()
        driven.turn(cycle, version, index)
        assert not driven.manager.asleep


@pytest.mark.parametrize(
    "scene",
    [
        _in_buckets,
        _shard_to_shard,
        lambda driven: _cycles(driven, True),
        lambda driven: _cycles(driven, False),
    ],
    ids=["buckets", "shard to shard", "stages", "stages at once"],
)
def test_two_refits_land_by_the_same_steps_in_all_ways(scene: Callable[[Driven], None]) -> None:
    taken = []
    for way in WAYS:
        with driven_in(way, EngineDouble()) as driven:
            scene(driven)
            taken.append(driven.manager.calls)
    assert taken[0] == taken[1] == taken[2]
    assert taken[0].count("update_weight_version") == 2


def test_an_idle_engine_is_paused_and_then_looked_at_once(alone: Driven) -> None:
    calls, refit = alone.manager.calls, alone.refit
    for version in (0, 1):
        calls.clear()
        refit.begin(version, Holder(0).specs())
        assert calls == ["pause in_place", "flush_cache", "begin"]
        refit.commit(version)


def test_another_loader_of_the_engine_adds_commands_to_its_workers(driven: Driven) -> None:
    manager, refit = driven.manager, driven.refit
    asked: list[Any] = []
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
    assert asked == [("package.of.another", [])]


def test_everything_that_is_wrong_with_an_engine_is_told_at_once(drive: Drive) -> None:
    wrong = {
        "custom_weight_loader": None,
        "pp_size": 2,
        "enable_eplb": True,
        "weight_cache_mode": "read",
        "speculative_algorithm": "DFLASH",
        # Stores that a flush leaves.
        "hicache_storage_backend": "file",
        "enable_lmcache": True,
        "enable_flexkv": True,
        "radix_cache_backend": "flexkv",
    }
    driven = drive(**wrong)
    with pytest.raises(RefitError) as caught:
        driven.open()
    assert [name for name in wrong if name not in str(caught.value)] == []
    assert driven.manager.calls == []
    assert not driven.manager.attached


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "another"}, "was not read"),
        ({"speculative_algorithm": "of a plugin"}, "was not read"),
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "policy"}, "own weights"),
        ({"speculative_algorithm": "eagle3"}, "own weights"),
        ({"speculative_algorithm": "EAGLE", "speculative_token_map": "map.pt"}, "speculative_token_map"),
        ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, "enable_multi_layer_eagle"),
    ],
)
def test_an_engine_whose_drafter_would_keep_old_weights_in_silence_is_refused(
    drive: Drive, settings: dict[str, Any], told: str
) -> None:
    driven = drive(**settings)
    with pytest.raises(RefitError, match=told) as caught:
        driven.open()
    assert caught.value.stage == "settings"
    assert driven.manager.calls == []


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "ngram"},
        {"speculative_algorithm": "EAGLE"},
        {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": "policy"},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "another"},
        {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": "another",
            "speculative_token_map": "map.pt",
        },
    ],
)
def test_an_engine_that_drafts_without_weights_or_whose_drafter_follows_or_is_known_to_stay_is_taken(
    drive: Drive, settings: dict[str, Any]
) -> None:
    assert drive(**settings).refit.version == -1


def test_a_store_that_was_attached_to_a_running_engine_is_refused_until_it_is_detached(drive: Drive) -> None:
    """SGLang attaches one to an engine with host memory for its cache, which alone is no such store."""
    driven = drive(enable_hierarchical_cache=True)
    updates, refit = driven.manager.updates, driven.refit
    updates["hicache_storage_backend"] = "file"
    server = open_rendezvous("127.0.0.1", 1, 1)
    trainer = join(server, 0)
    with pytest.raises(RefitError, match="hicache_storage_backend"):
        refit.join_refit(server.rendezvous.to_json(), 1, CONFIG)
    with pytest.raises(PeerLost, match="hicache_storage_backend") as heard:
        trainer.barrier("ready")
    assert heard.value.blamed == 1
    trainer.close()
    server.close()
    updates["hicache_storage_backend"] = None
    with driven.met() as bring:
        for version, index in enumerate((1, 2)):
            updates["hicache_storage_backend"] = "file"
            before = list(driven.manager.calls)
            for refused in (lambda v=version: refit.refit(v), lambda v=version: refit.begin(v, [])):
                with pytest.raises(RefitError, match="hicache_storage_backend"):
                    refused()
            assert driven.manager.calls == before
            updates["hicache_storage_backend"] = None
            bring(version, index)


def test_blocking_calls_in_the_engines_loop_are_refused_and_their_awaited_ones_answer(
    engine: EngineDouble,
) -> None:
    async def scenario() -> None:
        with pytest.raises(RefitError, match="AsyncSglangRefit"):
            SglangRefit(EngineCaller(engine))
        refit = await AsyncSglangRefit.open(engine)
        sender = Driven(engine, lambda: refit.blocking).sender
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


def test_an_engine_that_does_not_answer_is_not_waited_for_forever(engine: EngineDouble) -> None:
    async def silent(obj: Any, request: Any) -> None:
        await asyncio.sleep(60)

    engine.tokenizer_manager.update_weights_from_tensor = silent  # type: ignore[assignment,method-assign]
    with pytest.raises(RefitTimeout, match="update_weights_from_tensor"):
        SglangRefit(EngineCaller(engine, timeout_s=0.1))

    async def scenario() -> None:
        caller = EngineCaller(engine, asyncio.get_running_loop(), timeout_s=0.1)
        with pytest.raises(RefitTimeout, match="update_weights_from_tensor"):
            await asyncio.to_thread(SglangRefit, caller)

    engine.loop.run_until_complete(scenario())


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


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_refit_ends_before_the_next_steps_begin(engine: EngineDouble, times: int) -> None:
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert may_end.wait(20)
        order.append("first")

    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(engine)
        task = asyncio.ensure_future(refit.run(slow))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_later(0.1, may_end.set)
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
    with driven_in("over HTTP", engine) as driven, pytest.raises(RefitError, match="weight_cache_mode"):
        driven.open()


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


def test_an_untested_sglang_that_has_what_is_used_is_driven_with_a_warning(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driven = drive()
    for version, warnings in ((f"{VERSION}+local", 0), ("0.5.23", 0), ("0.5.18", 1), ("0.6.0", 2)):
        monkeypatch.setattr(sys.modules["sglang"], "__version__", version)
        driven.open()
        assert len(caplog.records) == warnings


def test_a_sglang_without_names_that_are_used_is_refused_before_anything_is_asked_of_its_workers(
    drive_alone: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = drive_alone()
    monkeypatch.delattr(sys.modules["sglang.srt.managers.io_struct"], "PauseGenerationReqInput")
    monkeypatch.delattr(type(driven.manager), "continue_generation")
    with pytest.raises(RefitError, match=r"continue_generation.*PauseGenerationReqInput"):
        driven.open()
    assert not driven.manager.attached


def test_updates_are_in_sessions_where_sglang_asks_for_them(drive_in_sessions: Drive) -> None:
    driven = drive_in_sessions()
    for version, index in enumerate((1, 2)):
        driven.bring(version, index)
    with driven.met() as bring:
        for version, index in enumerate((1, 2), 10):
            bring(version, index)
    assert not driven.manager.session
    # Of another caller, which the driver must not end.
    driven.manager.session = True
    for _ in range(2):
        with pytest.raises(RefitError, match="already open"):
            driven.sender.refit(20)
        assert driven.manager.session
    driven.manager.session = False
    driven.bring(21, 1)


def _original(self: Any, named_tensors: Any, fmt: str | None = None) -> tuple[bool, str]:
    return True, f"SGLang took {named_tensors} as {fmt}"


def test_the_loader_serves_commands_and_leaves_other_formats_to_sglang() -> None:
    def original(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        return _original(self, named_tensors, load_format)

    served = serving(original)
    assert served(None, ["w"], "flattened_bucket") == (True, "SGLang took ['w'] as flattened_bucket")
    assert served(None, ["w"]) == (True, "SGLang took ['w'] as None")
    assert served(None, [], load_format=LOADER) == (True, "[]")


def test_a_worker_whose_internals_differ_answers_and_its_scheduler_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater = types.ModuleType("sglang.srt.model_executor.model_runner_components.weight_updater")
    updater.WeightUpdater = type("WeightUpdater", (), {"update_weights_from_tensor": _original})  # type: ignore[attr-defined]
    for name in ("sglang.srt.model_executor", "sglang.srt.model_executor.model_runner_components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    load(None, [])  # without a WeightUpdater
    monkeypatch.setitem(sys.modules, updater.__name__, updater)
    load(None, [])
    load(None, [])
    worker = updater.WeightUpdater()
    success, message = worker.update_weights_from_tensor(["w"], LOADER)
    assert not success
    assert "WeightUpdater" in message or "No module" in message
    assert worker.update_weights_from_tensor(["w"], fmt="flattened_bucket")[0]
    assert refusing(_original, "why")(None, named_tensors=[], fmt=LOADER) == (False, "why")


def test_workers_that_do_not_serve_are_told_of_with_what_they_say(alone: Driven) -> None:
    async def unserved(obj: Any, request: Any) -> tuple[bool, str]:
        return True, "Success"

    alone.manager.update_weights_from_tensor = unserved  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="Success"):
        alone.open()


class TwoRanks:
    """A way to an engine of two workers, whose second one has the first GPU."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def call(self, step: Step) -> Answer:
        if step.name == "settings":
            return Answer(
                value=vars(ManagerDouble(tp_size=2).server_args) | {"version": VERSION, "has_sessions": False}
            )
        self.steps.append(step)
        found: list[dict[str, Any]] = [{"device": "GPU-b"}, {"device": "GPU-a"}]
        return Answer(message=json.dumps(found))


def test_payloads_are_given_in_the_order_of_the_workers_ranks_one_for_each() -> None:
    way = TwoRanks()
    refit = SglangRefit(way)
    assert refit.devices == ["GPU-b", "GPU-a"]
    way.steps.clear()
    refit.load({"GPU-a": "of a", "GPU-b": "of b"})
    sent, settled = (step.fields for step in way.steps)
    assert sent["serialized_named_tensors"] == ["of b", "of a"]
    assert (sent["load_format"], sent["flush_cache"]) == ("flattened_bucket", False)
    # Until the workers' copies are done, the sender keeps what they read.
    [(command, arguments)] = pickle.loads(base64.b64decode(settled["serialized_named_tensors"][0]))
    assert (command, json.loads(arguments)) == ("synchronize", [])
