"""Real SGLang engines on CPUs: its scheduler, its workers, its loaders, its HTTP endpoints.

``make test-sglang`` runs them; docs/sglang.md says what has run where.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.http_client import RefitClient
from rlrefit.workers.engines.sglang.callers import EngineCaller, HttpCaller
from rlrefit.workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.gpu.vllm_checkpoints import write_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource
from tests.spawn import free_port

from . import recorded
from .real_engine import PROMPTS, Scene
from .ways import StillTrainer

pytestmark = [
    # An engine's processes each load for many seconds.
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=120.0, verify="full")
CPU = torch.device("cpu")


class Trainer(StillTrainer):
    """One rank in this process, with a thread of its own for what waits for the engine."""

    def __init__(self, paths: list[str], ranks: int) -> None:
        self.source = CheckpointSource(paths, CPU)
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(1)
        self._session: RefitSession | None = None
        self._server: Any = None

    def begin_to_meet(self) -> tuple[dict[str, Any], Future[None]]:
        self._server = open_rendezvous("127.0.0.1", 1, self._ranks)
        meeting = self._server.rendezvous

        def join() -> None:
            self._session = RefitSession.open(meeting, 0, lambda: self.source, CONFIG)

        return meeting.to_json(), self._pool.submit(join)

    def send(self, index: int, version: int) -> Future[Any]:
        assert self._session is not None
        self.source.take_on(index)
        return self._pool.submit(self._session.refit, version)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._server.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("dense")
    scene = Scene([write_checkpoint(folder / f"{i}", i, fp8=False) for i in (0, 1)], "cpu")
    yield scene
    scene.engine.shutdown()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("experts")
    paths = [write_checkpoint(folder / f"{i}", i, fp8=False, experts=True) for i in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        # SGLang puts each rank of a CPU on a NUMA node of its own unless it is told the cores.
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        # It takes a NCCL that it finds for a sign of GPUs.
        patch.setenv("SGLANG_NCCL_SO_PATH", str(folder / "none"))
        # Without expert parallelism, whose batches need an accelerator.
        scene = Scene(paths, "cpu", tp_size=2, disable_radix_cache=True)
    yield scene
    scene.engine.shutdown()


def _sender(scene: Scene, refit: SglangRefit | None = None) -> tuple[SglangSender, CheckpointSource]:
    source = CheckpointSource(scene.paths, CPU)
    return SglangSender(source, refit or scene.refit, "cpu", 1 << 20), source


@pytest.fixture
def apart(dense: Scene) -> Iterator[Trainer]:
    trainer = Trainer(dense.paths, 1)
    yield trainer
    trainer.close()


def test_sglang_is_as_it_was_recorded() -> None:
    import sglang
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

    from rlrefit.workers.engines.sglang.callers import SETTINGS
    from rlrefit.workers.engines.sglang.compat import differences

    sessions = hasattr(TokenizerManager, "begin_weight_update")
    requests = recorded.REQUESTS_WITH_SESSIONS if sessions else recorded.REQUESTS
    methods = recorded.METHODS | (recorded.SESSION_METHODS if sessions else {})
    paths = recorded.PATHS | (recorded.SESSION_PATHS if sessions else {})
    assert sglang.__version__ == (recorded.VERSION_WITH_SESSIONS if sessions else recorded.VERSION)
    for structure, names in requests.items():
        found = getattr(io_struct, structure).__struct_fields__
        assert set(names) <= set(found) <= {*names, "rid", "http_worker_ipc"}, structure
    for method, arguments in methods.items():
        assert tuple(inspect.signature(getattr(TokenizerManager, method)).parameters) == arguments, method
    assert set(SETTINGS) <= set(inspect.signature(ServerArgs).parameters)
    assert tuple(inspect.signature(TokenizerManager.config_value).parameters) == ("self", "name")
    assert tuple(inspect.signature(TokenizerManager.get_internal_state).parameters) == ("self",)
    assert "is_pause" in TokenizerManager.pause_generation.__code__.co_names
    assert set(paths.values()) <= {getattr(route, "path", "") for route in http_server.app.routes}
    assert differences() == ""


def test_buckets_give_the_engine_that_was_started_from_the_weights(dense: Scene) -> None:
    sender, source = _sender(dense)
    for version, index in enumerate((1, 0, 1, 0)):
        dense.poison()
        source.take_on(index)
        record = sender.refit(version)
        assert record.bytes_misc == sum(spec.nbytes for spec in source.specs())
        assert dense.generate() == dense.references[index]
        assert (dense.refit.version, dense.refit.weight_version()) == (version, str(version))
    dense.check("compare")


def test_shard_to_shard_refits_give_the_engine_that_was_started_from_the_weights(
    dense: Scene, apart: Trainer
) -> None:
    meeting, joining = apart.begin_to_meet()
    [found] = dense.refit.join_refit(meeting, 1, CONFIG)
    joining.result()
    assert (found["misc"], found["unused"]) == (0, 0)
    for version, index in enumerate((1, 0, 1, 0), 10):
        dense.poison()
        sending = apart.send(index, version)
        [record] = dense.refit.refit(version)
        sending.result()
        assert record["bytes_bulk"] > 0 == record["bytes_misc"]
        assert dense.generate() == dense.references[index]
    dense.check("compare")


def test_experts_under_tp2_are_refitted_shard_to_shard_from_coroutines(experts: Scene) -> None:
    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(experts.engine)
        trainer = Trainer(experts.paths, 2)
        meeting, joining = trainer.begin_to_meet()
        found = await refit.join_refit(meeting, 1, CONFIG)
        joining.result()
        assert [rank["misc"] for rank in found] == [0, 0]
        for version, (index, mode) in enumerate(((1, "wait"), (0, "abort"), (1, "retract"), (0, "wait"))):
            sending = trainer.send(index, version)
            running = asyncio.ensure_future(experts.generate_async())
            await asyncio.sleep(0.05)
            records = await refit.refit(version, mode)  # type: ignore[arg-type]
            sending.result()
            assert len(records) == 2
            await asyncio.gather(running, return_exceptions=True)  # SGLang may raise what it aborted
            assert await experts.generate_async() == experts.references[index]
        trainer.close()

    experts.engine.loop.run_until_complete(scenario())
    experts.check("compare")


@pytest.mark.parametrize("multi_stage", [True, False], ids=["in stages", "at once"])
def test_a_cycle_of_memory_stages(dense: Scene, multi_stage: bool) -> None:
    sender, source = _sender(dense)
    cycle = ColocatedCycle(
        dense.refit,
        Trainer(dense.paths, 1),
        lambda version: [sender.refit(version)],
        multi_stage_wake_up=multi_stage,
    )
    for version, index in enumerate((1, 0), 20):
        cycle.to_training()
        with pytest.raises(EngineDirty, match="asleep"):
            dense.refit.require_servable()
        with pytest.raises(RefitError, match="asleep"):
            sender.refit(version)
        source.take_on(index)
        cycle.to_generation(version)
        assert cycle.generate(dense.generate) == dense.references[index]


def test_an_engine_with_requests_is_not_put_to_sleep(dense: Scene) -> None:
    async def scenario() -> None:
        refit = await AsyncSglangRefit.open(dense.engine)
        long = {"temperature": 0.0, "max_new_tokens": 600, "ignore_eos": True}
        running = asyncio.ensure_future(
            dense.engine.async_generate(input_ids=PROMPTS[0], sampling_params=long)
        )
        await asyncio.sleep(0.5)
        with pytest.raises(StageRefused, match="unfinished requests"):
            await refit.sleep()
        assert len((await running)["output_ids"]) == 600
        await refit.sleep()
        waiting = asyncio.ensure_future(dense.generate_async())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with pytest.raises(StageRefused, match="Nothing has changed"):
            await refit.wake(["experts"])
        sender, source = _sender(dense, refit.blocking)
        await refit.wake(["weights"])
        source.take_on(1)
        await refit.run(sender.refit, 30)
        assert not waiting.done()
        await refit.wake(["kv_cache"])
        assert await waiting == dense.references[1]

    dense.engine.loop.run_until_complete(scenario())


def test_a_second_driver_and_one_beside_other_callers_know_what_sleeps_and_is_paused(dense: Scene) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    manager, loop = dense.engine.tokenizer_manager, dense.engine.loop
    dense.refit.sleep()
    second = SglangRefit(EngineCaller(dense.engine))
    assert second.asleep() == {"weights", "kv_cache"}
    with pytest.raises(StageRefused, match="sleeps already"):
        second.sleep()
    sender, source = _sender(dense, second)
    cycle = ColocatedCycle(second, Trainer(dense.paths, 1), lambda version: [sender.refit(version)])
    for version, index in enumerate((1, 0), 40):
        cycle.to_training()
        dense.engine.release_memory_occupation(["cuda_graph"])
        source.take_on(index)
        cycle.to_generation(version)
        assert cycle.generate(dense.generate) == dense.references[index]
    dense.engine.release_memory_occupation()
    for driver in (dense.refit, second):
        assert driver.asleep() == {"weights", "kv_cache"}
        with pytest.raises(RefitError, match="asleep"):
            _sender(dense, driver)[0].refit(42)
    dense.refit.wake()
    with pytest.raises(EngineDirty, match="discarded"):
        second.require_servable()
    source.take_on(1)
    sender.refit(42)
    for mode in ("in_place", "retract", "abort"):
        loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode=mode)))
        for driver in (dense.refit, second):
            with pytest.raises(EngineDirty, match="paused"):
                driver.require_servable()
        dense.refit.resume()
        second.require_servable()
    assert dense.generate() == dense.references[1]


def test_running_requests_are_aborted_for_buckets_and_for_a_cycle(dense: Scene) -> None:
    async def scenario() -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        refit = await AsyncSglangRefit.open(dense.engine)
        sender, source = _sender(dense, refit.blocking)
        cycle = await refit.run(
            ColocatedCycle, refit.blocking, Trainer(dense.paths, 1), lambda version: [sender.refit(version)]
        )
        long = {"temperature": 0.0, "max_new_tokens": 2000, "ignore_eos": True}

        async def begun() -> asyncio.Future[Any]:
            running = asyncio.ensure_future(
                dense.engine.async_generate(input_ids=PROMPTS[0], sampling_params=long)
            )
            await asyncio.sleep(0.5)
            return running

        async def ended(running: asyncio.Future[Any]) -> int:
            output = await asyncio.wait_for(running, 20)
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            return len(output["output_ids"])

        for version, index in enumerate((1, 0), 45):
            running = await begun()
            assert await refit.asleep() == frozenset()
            assert not running.done()
            source.take_on(index)
            await refit.run(sender.refit, version, "abort")
            assert 0 < await ended(running) < 2000
            assert await dense.generate_async() == dense.references[index]
        running = await begun()
        # Nothing of a paused engine ends by itself.
        await dense.engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        with pytest.raises(RefitError, match="mode='abort'"):
            await refit.run(sender.refit, 47)
        await refit.run(sender.refit, 47, "abort")
        # SGLang hands over each fifty tokens, of which a fast CPU has made some before the pause.
        assert await ended(running) < 2000
        running = await begun()
        await refit.pause("abort")
        assert 0 < await ended(running) < 2000
        await refit.run(cycle.to_training)
        source.take_on(1)
        await refit.run(cycle.to_generation, 48)
        assert await dense.generate_async() == dense.references[1]
        running = await begun()
        await refit.sleep(mode="abort")
        assert 0 < await ended(running) < 2000
        await refit.wake(["weights"])
        await refit.run(sender.refit, 49)
        await refit.wake(["kv_cache"])
        assert await dense.generate_async() == dense.references[1]

    dense.engine.loop.run_until_complete(scenario())


def test_the_server_is_driven_over_http(dense: Scene, apart: Trainer) -> None:
    """SGLang's own endpoints, served in the engine's loop."""
    import uvicorn
    from sglang.srt.entrypoints import http_server

    http_server.set_global_state(
        http_server._GlobalState(
            tokenizer_manager=dense.engine.tokenizer_manager,
            template_manager=dense.engine.template_manager,
            scheduler_info=dense.engine._scheduler_init_result.scheduler_infos[0],
        )
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = uvicorn.Server(
        uvicorn.Config(http_server.app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")
    )

    def work() -> None:
        refit = SglangRefit(HttpCaller(url))
        sender, source = _sender(dense, refit)
        for version, index in enumerate((1, 0), 60):
            source.take_on(index)
            refit.sleep(mode="abort")
            assert SglangRefit(HttpCaller(url)).asleep() == {"weights", "kv_cache"}
            refit.wake(["weights"])
            sender.refit(version)
            refit.wake(["kv_cache"])
            assert (refit.version, refit.weight_version()) == (version, str(version))
        with pytest.raises(RefitError, match="no trainer has been met"):
            refit.refit(62)
        client = RefitClient(url)
        meeting, joining = apart.begin_to_meet()
        client.join_refit(meeting, 1, CONFIG)
        joining.result()
        for version, index in enumerate((1, 0), 62):
            sending = apart.send(index, version)
            running = generating()
            [record] = client.refit(version)
            sending.result()
            running.result()
            assert (record["version"], client.version) == (version, version)
            client.require_servable()
            assert generating().result() == dense.references[index]
        sending = apart.send(1, 70)
        with pytest.raises(RefitMismatch, match="as it was"):
            client.refit(64)
        assert isinstance(sending.exception(), RefitMismatch)
        client.require_servable()

    def generating() -> Future[list[Any]]:
        return asyncio.run_coroutine_threadsafe(dense.generate_async(), dense.engine.loop)

    async def scenario() -> None:
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.05)
        try:
            await asyncio.to_thread(work)
        finally:
            server.should_exit = True
            await serving

    dense.engine.loop.run_until_complete(scenario())
    assert dense.generate() == dense.references[0]
    dense.check("compare")
