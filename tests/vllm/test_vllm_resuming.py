"""vLLM's engine core without a model: when it resumes, around sleep and around weights whose old prefixes stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.executor.abstract import Executor

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.answers import answer
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.driver import VllmDriver
from rlrefit.workers.engines.vllm.patches import stay_paused_while_asleep, watch_weight_updates
from rlrefit.workers.engines.vllm.transfer_engine import RlrefitTransferEngine


class _Executor(Executor):
    """vLLM's own bookkeeping of sleep over one worker, which answers the weight-transfer calls."""

    def __init__(self) -> None:
        self.is_sleeping, self.sleeping_tags, self.calls = False, set(), []
        self.refused: set[str] = set()
        self.version = 6
        self.engine = object.__new__(RlrefitTransferEngine)
        self.engine._refit = SimpleNamespace(
            guard=SimpleNamespace(require_awake=lambda: None),
            serving_version=lambda: 7,
            refit_state=SimpleNamespace(version=7),
            refit=lambda version: {"version": version},
        )
        self.engine._engine, self.engine._updating, self.engine._committed = "nccl_xfer", False, 0

    def _init_executor(self) -> None:
        raise AssertionError("vLLM's constructor was not to run")

    def check_health(self) -> None:
        raise AssertionError("nobody asks")

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(method)
        if method in self.refused:
            return [answer(lambda: self._refuse(method))]
        transfer = {
            "start_weight_update": self.engine.start,
            "update_weights": self.engine.update,
            "finish_weight_update": self.engine.finish,
        }
        if method in transfer:
            return [transfer[method](None, *args, **(kwargs or {}))]
        if method == "refit":
            [self.version] = args
        return [{"asleep": [], "version": self.version}]

    @staticmethod
    def _refuse(method: str) -> dict[str, Any]:
        raise RefitError(f"{method} failed on a worker")


class _Scheduler:
    def __init__(self) -> None:
        self.pause_state, self.running = PauseState.UNPAUSED, []
        self.holds: Exception | bool | None = None

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        return False

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        if isinstance(self.holds, Exception):
            raise self.holds
        return self.holds is None


def _core(kind: type[EngineCore] = EngineCore, backend: str = "rlrefit") -> Any:
    stay_paused_while_asleep()
    watch_weight_updates()
    core: Any = object.__new__(kind)
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False),
    )
    core.model_executor, core.scheduler = _Executor(), _Scheduler()
    return core


def _update(core: Any, version: int) -> None:
    core.collective_rpc("start_weight_update", kwargs={"is_checkpoint_format": True})
    core.collective_rpc("update_weights", args=({"version": version},))


def _latched(core: Any) -> Any:
    """Paused by a server call whose new weights came and whose old prefixes stayed."""
    core.scheduler.holds = RuntimeError("blocks are held")
    with pytest.raises(RefitError, match="blocks are held"):
        _update(core, 7)
    with pytest.raises(RefitError, match="stays paused"):
        core.resume_scheduler()
    return core


class _Llm:
    """``vllm.LLM`` around a core without requests."""

    def __init__(self, core: Any) -> None:
        self.llm_engine, self.vllm_config = self, core.vllm_config
        self.output_processor = SimpleNamespace(request_states={})
        self.sleep, self.wake_up, self.is_sleeping = core.sleep, core.wake_up, core.is_sleeping
        self.reset_prefix_cache, self._rpc = core.reset_prefix_cache, core.collective_rpc

    def has_unfinished_requests(self) -> bool:
        return False

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self._rpc(method, None, args)


class _AsyncLlm:
    """``AsyncLLM`` around cores of replicas without requests."""

    def __init__(self, *cores: Any) -> None:
        self.vllm_config, self.engine_core, self.core_engines = cores[0].vllm_config, self, cores
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_ranks_managed, self.outputs_queue = [0], asyncio.Queue[Any]()
        self.output_handler: asyncio.Task[None] | None = None

    def _run_output_handler(self) -> None:
        async def read() -> None:
            while True:
                assert not (await self.outputs_queue.get()).outputs

        if self.output_handler is None:
            self.output_handler = asyncio.create_task(read())

    async def _call_utility_async(self, utility: str, *arguments: Any, engine: Any) -> Any:
        return getattr(engine, utility)(*arguments)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        for core in self.core_engines:
            core.pause_scheduler(mode, clear_cache)

    async def resume_generation(self) -> None:
        for core in self.core_engines:
            core.resume_scheduler()


def _scripts_refit(core: Any) -> Callable[[int], Any]:
    driver = VllmDriver(_Llm(core))
    driver.init_refit({}, 1, RefitConfig())
    return driver.refit


def _servers_refit(core: Any) -> Callable[[int], Any]:
    """Of two replicas, the other of which could drop what its old weights made."""
    other = _core()

    async def scene(version: int) -> None:
        driver = AsyncVllmDriver(_AsyncLlm(core, other))
        await driver.init_refit({}, 1, RefitConfig())
        await driver.refit(version)
        assert not other.is_scheduler_paused()

    return lambda version: asyncio.run(scene(version))


def _asleep(core: Any) -> Any:
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.model_executor.sleep(1)
    return core


def test_an_engine_that_wakes_in_parts_resumes_when_all_of_it_is_awake():
    for backend, paused in (("rlrefit", True), ("nccl", False)):
        core = _asleep(_core(backend=backend))
        core.wake_up(["weights"])
        assert core.is_scheduler_paused() == paused
        core.wake_up(["kv_cache"])
        assert not core.is_scheduler_paused()


def test_resume_between_two_wakes_waits_for_the_last_wake():
    core = _asleep(_core())
    core.wake_up(["weights"])
    _update(core, 7)
    core.collective_rpc("finish_weight_update")
    core.resume_scheduler()
    assert core.is_scheduler_paused()
    core.wake_up(["scheduling"])
    assert core.is_scheduler_paused()
    core.wake_up(["kv_cache"])
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize("holds", [RuntimeError("blocks are held"), KeyError("a connector's"), False])
def test_prefixes_that_stay_keep_the_engine_paused_until_an_update_could_drop_them(holds: Any):
    core = _core()
    core.scheduler.holds = holds
    for version in (7, 8):  # the second begins anew, past the one that was not finished
        with pytest.raises(RefitError, match="keeps what the old ones made"):
            _update(core, version)
        with pytest.raises(RefitError, match="does not resume"):
            core.collective_rpc("finish_weight_update")
        for resume in (core.resume_scheduler, lambda: core.wake_up(["scheduling"])):
            with pytest.raises(RefitError, match="update anew or refit by a driver, and resume then"):
                resume()
        assert core.is_scheduler_paused()
    assert "finish_weight_update" not in core.model_executor.calls
    core.scheduler.holds = None
    _update(core, 9)
    assert core.collective_rpc("finish_weight_update") == [{"version": 7}]
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


def test_finishing_again_drops_prefixes_that_stayed():
    core = _core()
    core.scheduler.holds = RuntimeError("blocks are held")
    with pytest.raises(RefitError, match="blocks are held"):
        _update(core, 7)
    core.scheduler.holds = None
    with pytest.raises(RefitError, match="blocks are held"):
        core.resume_scheduler()
    core.collective_rpc("finish_weight_update")
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize("through", [_scripts_refit, _servers_refit], ids=["LLM", "AsyncLLM"])
def test_a_drivers_refit_that_drops_what_a_server_call_left_resumes_the_engine(through: Any):
    core = _latched(_core())
    refit = through(core)
    for version in (8, 9):
        # Whatever fails of it, the engine stays paused: weights that did not come, and prefixes that stay.
        core.model_executor.refused = {"refit"}
        with pytest.raises(RefitError, match="refit failed on a worker"):
            refit(version)
        core.model_executor.refused = set()
        with pytest.raises(RefitError, match="blocks are held"):
            refit(version)
        with pytest.raises(RefitError, match="stays paused"):
            core.resume_scheduler()
        assert core.is_scheduler_paused()
    core.scheduler.holds = None
    refit(10)
    assert not core.is_scheduler_paused()
    core.pause_scheduler("keep", clear_cache=False)
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


def test_only_a_refit_that_every_worker_serves_lets_an_engine_resume_that_kept_old_prefixes():
    core = _latched(_core())
    core.scheduler.holds = None
    # Weights that arrived, prefixes that were dropped, and a worker that serves another version: each alone.
    core.collective_rpc("refit", args=(8,))
    core.reset_prefix_cache(True, False)
    core.model_executor.refused = {"refit_caches_dropped"}
    core.collective_rpc("refit_caches_dropped", args=(8,))
    with pytest.raises(RefitError, match="stays paused"):
        core.resume_scheduler()
    core.model_executor.refused = set()
    core.collective_rpc("refit_caches_dropped", args=(8,))
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


def test_a_script_whose_engine_kept_old_prefixes_is_told_so_instead_of_waiting_for_tokens():
    driver = VllmDriver(_Llm(_latched(_core())))
    with pytest.raises(RefitError, match=r"stays paused.*blocks are held"):
        driver.generate(["x"], None)


def test_a_sleeper_with_prefixes_that_stayed_wakes_and_stays_paused():
    core = _core()
    core.scheduler.holds = RuntimeError("blocks are held")
    with pytest.raises(RefitError):
        _update(core, 7)
    _asleep(core)
    core.wake_up(["weights"])
    with pytest.raises(RefitError, match="blocks are held"):
        core.wake_up(["kv_cache"])
    assert not core.model_executor.is_sleeping
    assert core.is_scheduler_paused()


def test_an_engine_that_is_paused_is_not_paused_again(monkeypatch: pytest.MonkeyPatch):
    pauses: list[str] = []
    monkeypatch.setattr(EngineCore, "pause_scheduler", lambda core, mode, clear_cache: pauses.append(mode))
    for state, expected in ((PauseState.PAUSED_NEW, []), (PauseState.UNPAUSED, ["keep"])):
        core = _core()
        core.scheduler.pause_state, core.scheduler.holds = state, False
        with pytest.raises(RefitError):
            _update(core, 7)
        assert pauses == expected


def test_data_parallel_replicas_resume_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    """Each asks the others before vLLM's barrier, where it would wait for one that stays paused."""
    others = {"wait": True}
    asked: list[bool] = []

    def any_of_them(group: str, mine: bool) -> bool:
        assert group == "replicas"
        asked.append(mine)
        return mine or others["wait"]

    monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", staticmethod(any_of_them))
    core = _core(DPEngineCoreProc)
    core.dp_group, core.pending_pause, core.engines_running, core.ignore_start_dp_wave = (
        "replicas",
        *(False, False, True),
    )
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.resume_scheduler()
    assert (core.is_scheduler_paused(), asked) == (True, [False])
    others["wait"] = False
    core.model_executor.sleep(1)
    core.wake_up(["weights"])
    assert (core.is_scheduler_paused(), asked) == (True, [False, True])
    core.wake_up(["kv_cache"])
    assert (core.is_scheduler_paused(), asked) == (False, [False, True, False, False])
    core.scheduler.holds, core.scheduler.pause_state = False, PauseState.PAUSED_ALL
    with pytest.raises(RefitError):
        _update(core, 7)
    with pytest.raises(RefitError, match="stays paused"):
        core.resume_scheduler()
    assert asked[-1] is True
    core.engines_running = True
    core.ignore_start_dp_wave = True
    with pytest.raises(RuntimeError, match="pause is still in flight"):
        core.resume_scheduler()
