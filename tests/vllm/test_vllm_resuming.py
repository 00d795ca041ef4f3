"""vLLM's engine core without a model: when it resumes, around sleep and around weights whose old prefixes stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm_core_doubles import AsyncLlm, Llm, core_of, script_driver, server_driver

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.driver import VllmDriver
from rlrefit.workers.engines.vllm.patches import _pause_by_outputs


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


def _servers_refit(core: Any) -> Callable[[int], Any]:
    """Of two replicas, the other of which could drop what its old weights made."""
    other = core_of()

    async def scene(version: int) -> None:
        await (await server_driver(AsyncLlm(core, other))).refit(version)
        assert not other.is_scheduler_paused()

    return lambda version: asyncio.run(scene(version))


def _asleep(core: Any) -> Any:
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.model_executor.sleep(1)
    return core


def test_an_engine_that_wakes_in_parts_resumes_when_all_of_it_is_awake():
    for backend, paused in (("rlrefit", True), ("nccl", False)):
        core = _asleep(core_of(backend=backend))
        core.wake_up(["weights"])
        assert core.is_scheduler_paused() == paused
        if paused:  # also after an update and a resume in between
            _update(core, 7)
            core.collective_rpc("finish_weight_update")
            core.resume_scheduler()
            core.wake_up(["scheduling"])
            assert core.is_scheduler_paused()
        core.wake_up(["kv_cache"])
        assert not core.is_scheduler_paused()


@pytest.mark.parametrize("holds", [RuntimeError("blocks are held"), KeyError("a connector's"), False])
def test_prefixes_that_stay_keep_the_engine_paused_until_an_update_could_drop_them(holds: Any):
    core = core_of()
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
    core = _latched(core_of())
    core.scheduler.holds = None
    with pytest.raises(RefitError, match="blocks are held"):
        core.resume_scheduler()
    core.collective_rpc("finish_weight_update")
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize(
    "through", [lambda core: script_driver(core).refit, _servers_refit], ids=["LLM", "AsyncLLM"]
)
def test_a_drivers_refit_that_drops_what_a_server_call_left_resumes_the_engine(through: Any):
    core = _latched(core_of())
    refit = through(core)
    for version in (8, 9):
        # Whatever fails of it, the engine stays paused: weights that did not come, and prefixes that stay.
        core.model_executor.fails["refit"] = RefitError("no trainer came")
        with pytest.raises(RefitError, match="no trainer came"):
            refit(version)
        core.model_executor.fails.clear()
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
    core = _latched(core_of())
    core.scheduler.holds = None
    # Weights that arrived, prefixes that were dropped, and a worker that serves another version: each alone.
    core.collective_rpc("refit", args=(8,))
    core.reset_prefix_cache(True, False)
    core.model_executor.fails["refit_caches_dropped"] = RefitError("another version")
    core.collective_rpc("refit_caches_dropped", args=(8,))
    with pytest.raises(RefitError, match="stays paused"):
        core.resume_scheduler()
    core.model_executor.fails.clear()
    core.collective_rpc("refit_caches_dropped", args=(8,))
    core.resume_scheduler()
    assert not core.is_scheduler_paused()


def test_a_script_whose_engine_kept_old_prefixes_is_told_so_instead_of_waiting_for_tokens():
    driver = VllmDriver(Llm(_latched(core_of())))
    with pytest.raises(RefitError, match=r"stays paused.*blocks are held"):
        driver.generate(["x"], None)


def test_a_sleeper_with_prefixes_that_stayed_wakes_and_stays_paused():
    core = _asleep(_latched(core_of()))
    core.wake_up(["weights"])
    with pytest.raises(RefitError, match="blocks are held"):
        core.wake_up(["kv_cache"])
    assert not core.model_executor.is_sleeping
    assert core.is_scheduler_paused()


def test_an_engine_that_is_paused_is_not_paused_again(monkeypatch: pytest.MonkeyPatch):
    pauses: list[str] = []
    monkeypatch.setattr(EngineCore, "pause_scheduler", lambda core, mode, clear_cache: pauses.append(mode))
    for state, expected in ((PauseState.PAUSED_NEW, []), (PauseState.UNPAUSED, ["keep"])):
        core = core_of()
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
    core = core_of(DPEngineCoreProc)
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


@pytest.mark.parametrize(
    ("backend", "extension", "ours"),
    [
        ("rlrefit", "", True),
        (None, "rlrefit.workers.engines.vllm.extension.VllmRefitExtension", True),
        ("nccl", "other.Extension", False),
    ],
)
def test_our_engines_pauses_end_with_the_outputs_of_before_and_wait_for_no_time(
    backend: str | None, extension: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pause_by_outputs()
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        # Of ours none would end.
        await (asyncio.get_running_loop().create_future() if ours and seconds else sleep(0))
        slept.extend([seconds] if seconds else [])

    class Output:
        outputs: tuple[Any, ...] = ()
        read = False

        def __getattribute__(self, name: str) -> Any:
            if name == "outputs":
                type(self).read = True
            return super().__getattribute__(name)

    async def scene() -> None:
        llm = AsyncLlm(core_of(backend=backend, extension=extension))
        llm.outputs_queue.put_nowait(Output())
        await asyncio.wait_for(AsyncLLM.pause_generation(llm, mode="keep", clear_cache=False), 20)
        assert llm.paused
        assert Output.read == ours
        llm.fails["pause_generation"] = ValueError("not now")
        with pytest.raises(ValueError, match="not now"):
            await AsyncLLM.pause_generation(llm, mode="keep", clear_cache=False)

    monkeypatch.setattr(asyncio, "sleep", noted)
    asyncio.run(scene())
    assert slept == ([] if ours else [0.02])
