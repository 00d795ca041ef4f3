"""Engines that sleep. The CPU has no sleep mode: the calls are vLLM's, its memory stays."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_engines import GEN_RANKS, PROMPTS, ScriptEngine

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.integration.records.record import RefitRecord
from tests.stages.pool import TrainersElsewhere

from .scene import BY_A_SCRIPT, BY_A_SERVER, Scene


def test_requests_that_came_while_the_engine_slept_run_when_all_of_it_is_awake(scene: Scene):
    scene.refit(1)
    scene.engine.sleep(2)
    with ThreadPoolExecutor() as pool:
        waiting = None
        if isinstance(scene.engine, ScriptEngine):
            with pytest.raises(EngineDirty, match="sleep"):
                scene.engine.generate()
        else:
            waiting = pool.submit(scene.engine.generate)
        scene.engine.wake_up(["weights"])
        time.sleep(0.3)
        scene.refit(0)
        if isinstance(scene.engine, ScriptEngine):
            with pytest.raises(EngineDirty, match=r"kv_cache of the engine are asleep"):
                scene.engine.generate()
        scene.engine.wake_up(["kv_cache"])
        found = waiting.result(120) if waiting else scene.engine.generate()
    assert [s.values() for s in found] == [s.values() for s in scene.sampled_a]
    assert {v for s in found for v in s.versions} == {scene.version}


@BY_A_SCRIPT
def test_weights_that_are_asleep_are_not_written_and_discarded_ones_not_served(scene: Scene):
    """The CPU has no sleep mode: the calls are vLLM's, its memory stays."""
    scene.refit(0)
    scene.engine.sleep(1)
    sending = scene.trainers.start("refit", scene.model, 1, scene.version + 1)
    with pytest.raises(RefitError, match=r"weights of the engine are asleep"):
        scene.engine.refit(scene.version + 1)
    assert all("PeerLost" in answer for answer in sending.result())
    assert scene.digests() == scene.digests_a
    scene.engine.wake_up(["weights"])
    scene.engine.wake_up(["kv_cache"])

    scene.meet()
    scene.engine.sleep(2)
    scene.engine.wake_up(["weights"])
    with pytest.raises(EngineDirty, match="level 2 sleep"):
        scene.engine.version()
    scene.refit(0)
    scene.engine.wake_up(["kv_cache"])
    assert scene.engine.version() == scene.version
    assert scene.serves_a()


@BY_A_SCRIPT
def test_the_colocated_cycle_leads_an_engine_through_its_stages(scene: Scene):
    _lead(scene, multi=True)


@BY_A_SERVER
def test_the_colocated_cycle_leads_an_engine_through_its_stages_at_once(scene: Scene):
    _lead(scene, multi=False)


def _lead(scene: Scene, multi: bool) -> None:
    """Here too the memory stays where it is. An ``AsyncLLM`` is awaited in another thread than this one."""
    engine = scene.engine.sleeper()
    stages: list[StageRecord] = []
    cycle = ColocatedCycle(
        engine,
        TrainersElsewhere(),
        lambda version: [RefitRecord(**record) for record in scene.refit(version % 2)],
        multi_stage_wake_up=multi,
        on_stage=stages.append,
    )

    def meanwhile() -> None:
        with pytest.raises(StageRefused, match="engine 0 has unfinished requests"):
            cycle.sleep()

    scene.generate_and(meanwhile, 0, PROMPTS, 60)
    for _ in range(2):
        version = scene.version + 1
        cycle.to_training()
        with pytest.raises(EngineDirty, match="sleep"):
            scene.engine.version()
        found = cycle.to_generation(version)
        assert {record.version for record in found} == {version} == {scene.engine.version()}
        woken = ("wake_weights", "wake_kv_cache") if multi else ("wake_all",)
        assert all(record.stage_peaks[move] > 0 for record in found for move in woken)
        assert (scene.digests() == scene.digests_a) == (version % 2 == 0)
        sampled = cycle.generate(lambda: scene.engine.generate(tokens=4))
        assert {v for s in sampled for v in s.versions} == {version}
    with pytest.raises(StageRefused, match="kv_cache is awake already"):
        engine.wake(["kv_cache"])
    assert [p.process for p in stages[-1].processes] == [f"engine rank {i}" for i in range(GEN_RANKS)]
