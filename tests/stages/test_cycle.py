"""The cycle over a counted device: its order of calls, what fits only in stages, failures, and what lands on record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import ProcessMemory, StageRecord, write_records
from rlrefit.integration.colocated.stages import Stage, StageError, StageFailed, StageRefused
from rlrefit.integration.errors import EngineDirty, RefitError

from .pool import Device, OutOfMemory, PoolEngine, PoolTrainer, refit_on

# Weights 20, KV cache 60, optimizer 70: in stages at most 90 at once (trainer whole), all at once 100.
TIGHT, AMPLE = 95, 200


def make(total: int, *, multi: bool = True) -> tuple[Device, ColocatedCycle, list[StageRecord]]:
    device, records = Device(total), []
    cycle = ColocatedCycle(
        PoolEngine(device),
        PoolTrainer(device),
        refit_on(device),
        multi_stage_wake_up=multi,
        on_stage=records.append,
    )
    return device, cycle, records


def take_a_turn(cycle: ColocatedCycle) -> None:
    cycle.to_training()
    cycle.to_generation(7)


@pytest.mark.parametrize("multi", [True, False])
def test_both_caches_are_emptied_before_every_wake_and_the_kv_cache_wakes_last(multi: bool) -> None:
    device, cycle, _ = make(TIGHT if multi else AMPLE, multi=multi)
    for version in range(3):
        device.calls.clear()
        cycle.to_training()
        cycle.train(lambda: None)
        cycle.to_generation(version)
        woken, left = ("weights", ["empty engine", "wake kv_cache"]) if multi else ("weights kv_cache", [])
        assert device.calls == [
            *("sleep", "onload", "offload"),
            *("empty trainer", "empty engine", f"wake {woken}", f"refit {version}"),
            *("free", "empty trainer", *left),
        ]
        assert cycle.state.stage is Stage.AWAKE
        assert cycle.generate(lambda: "text") == "text"


def test_what_fits_in_stages_runs_out_of_memory_without_them() -> None:
    _, cycle, _ = make(TIGHT)
    cycle.to_training()
    assert cycle.to_generation(0)
    _, cycle, records = make(TIGHT, multi=False)
    cycle.to_training()
    with pytest.raises(StageFailed, match=r"Stage: lost\. Start the engine anew") as caught:
        cycle.to_generation(0)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    assert (records[-1].move, cycle.state.stage) == ("wake_all", Stage.LOST)
    assert records[-1].failed.startswith("OutOfMemory: engine ")
    with pytest.raises(StageError):
        cycle.to_training()


def test_the_records_hold_the_peak_of_every_stage_since_the_last_refit(tmp_path: Path) -> None:
    device = Device(AMPLE)
    file = tmp_path / "stages.jsonl"
    cycle = ColocatedCycle(
        PoolEngine(device), PoolTrainer(device), refit_on(device), on_stage=write_records(file)
    )
    expected = {
        "sleep": 80,
        "load_trainer": 90,
        "train": 90,
        "offload_trainer": 90,
        "wake_weights": 90,
        "refit": 40,
        "free_trainer": 40,
        "wake_kv_cache": 80,
    }
    for version in range(2):
        cycle.to_training()
        cycle.train(lambda: None)
        found = cycle.to_generation(version)
        assert [record.version for record in found] == [version] * 2
        assert all(record.stage_peaks == expected for record in found)
        assert found[0].to_json()["stage_peaks"] == expected
        cycle.generate(lambda: None)
        # Of the cycle that comes next, whose records are still to be made.
        expected["generate"] = 80
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["move"] for line in lines[:9]] == list(expected)
    assert [line["cycle"] for line in lines if line["move"] == "refit"] == [0, 1]
    assert [line["version"] for line in lines if line["move"] == "refit"] == [0, 1]
    assert {line["device_peak"] for line in lines} == set(expected.values())
    assert all(line["seconds"] >= 0 and not line["failed"] and len(line["processes"]) == 2 for line in lines)


@pytest.mark.parametrize(
    ("call", "stage", "then"),
    [
        ("sleep", Stage.LOST, None),
        ("onload", Stage.TRAINER_PARTLY, ColocatedCycle.to_training),
        ("offload", Stage.TRAINER_LEAVING, lambda cycle: cycle.to_generation(7)),
        ("wake weights", Stage.LOST, None),
        ("refit 7", Stage.WEIGHTS_AWAKE, lambda cycle: cycle.to_generation(7)),
        ("free", Stage.REFITTED, lambda cycle: cycle.to_generation(7)),
        ("wake kv_cache", Stage.LOST, None),
    ],
)
@pytest.mark.parametrize("error", [ValueError("broken"), EngineDirty("dirty"), KeyboardInterrupt()])
def test_a_failure_leaves_a_stage_that_the_cycle_goes_on_from_or_says_is_lost(
    call: str, stage: Stage, then: Callable[[ColocatedCycle], object] | None, error: BaseException
) -> None:
    device, cycle, records = make(AMPLE)
    device.fails[call] = error
    expected = StageFailed if isinstance(error, ValueError) else type(error)
    with pytest.raises(expected) as caught:
        take_a_turn(cycle)
    assert cycle.state.stage is stage
    assert records[-1].failed == f"{type(error).__name__}: {error}"
    # Who interrupts wants an end, and a process that is in the middle of its work answers nobody.
    assert bool(records[-1].processes) is isinstance(error, Exception)
    told = str(caught.value) if expected is StageFailed else " ".join(caught.value.__notes__)
    assert f"Stage: {stage}. " in told
    assert cycle.state.remedy in told
    if then is None:
        assert not cycle.state.legal
        return
    then(cycle)
    if cycle.state.stage is Stage.TRAINING:
        cycle.to_generation(7)
    assert cycle.state.stage is Stage.AWAKE
    assert device.calls.count("refit 7") == (2 if call == "refit 7" else 1)
    cycle.generate(lambda: None)


def test_after_a_failure_only_those_are_asked_that_the_caller_names_and_its_advice_is_told() -> None:
    device, records = Device(AMPLE), []
    engine, trainer = PoolEngine(device), PoolTrainer(device)
    cycle = ColocatedCycle(
        engine,
        trainer,
        refit_on(device),
        on_stage=records.append,
        after_failure=engine.memory,
        advice="Start over",
    )
    cycle.to_training()

    def fail() -> None:
        trainer.memory = never  # type: ignore[method-assign]
        raise ValueError("rank 0 is gone")

    def never(*, restart: bool = False) -> list[ProcessMemory]:
        raise AssertionError("a rank that waits for rank 0 was asked")

    with pytest.raises(StageFailed, match=r"rank 0 is gone\. Stage: training\. Start over\."):
        cycle.train(fail)
    assert [process.process for process in records[-1].processes] == ["engine rank 0"]


@pytest.mark.parametrize("work", ["train", "generate"])
def test_work_that_fails_leaves_the_stage_as_it_was(work: str) -> None:
    _, cycle, _ = make(AMPLE)
    if work == "train":
        cycle.to_training()
    before = cycle.state.stage

    def fail() -> None:
        raise OutOfMemory("too long a batch")

    with pytest.raises(StageFailed, match=f"{work} failed: OutOfMemory: too long a batch.*Repeat it"):
        getattr(cycle, work)(fail)
    assert cycle.state.stage is before
    getattr(cycle, work)(lambda: None)


def test_an_engine_that_refuses_stays_at_its_stage() -> None:
    device, cycle, records = make(AMPLE)
    device.fails["sleep"] = StageRefused("requests are running")
    with pytest.raises(StageRefused):
        cycle.to_training()
    assert cycle.state.stage is Stage.AWAKE
    assert not cycle.state.failed
    assert records[-1].failed == "StageRefused: requests are running"
    cycle.to_training()


def test_an_engine_that_passes_over_a_wake_up_is_found_out() -> None:
    device = Device(AMPLE)
    engine = PoolEngine(device)
    cycle = ColocatedCycle(engine, PoolTrainer(device), refit_on(device))
    cycle.to_training()
    engine.wake = lambda tags: None  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="kv_cache and weights sleeps, where kv_cache should"):
        cycle.to_generation(0)
    assert cycle.state.stage is Stage.LOST


@pytest.mark.parametrize("multi", [True, False])
def test_a_refit_that_the_trainer_refuses_leads_back_to_it_by_a_sleep(multi: bool) -> None:
    device, cycle, _ = make(AMPLE, multi=multi)
    cycle.to_training()
    device.fails["refit 1"] = RefitError("the trainer's shards are away")
    with pytest.raises(RefitError, match="shards are away") as caught:
        cycle.to_generation(1)
    assert "have the engine sleep again (sleep), and load_trainer" in caught.value.__notes__[0]
    device.calls.clear()
    cycle.to_training()
    # Engines pass over a sleep where a part sleeps already.
    rest = ["empty trainer", "empty engine", "wake kv_cache"] if multi else []
    assert device.calls == [*rest, "sleep", "onload"]
    cycle.to_generation(1)
    assert cycle.generate(lambda: "text") == "text"


def test_a_cycle_begins_with_an_engine_that_is_awake_or_asleep_as_a_whole() -> None:
    device = Device(AMPLE)
    engine, trainer = PoolEngine(device), PoolTrainer(device)
    engine.sleep(1)
    cycle = ColocatedCycle(engine, trainer, refit_on(device))
    assert cycle.state.stage is Stage.SLEEPING
    cycle.to_training()
    assert engine.level == 1
    engine.wake(["weights"])
    with pytest.raises(StageError, match="kv_cache is asleep and the rest awake"):
        ColocatedCycle(engine, trainer, refit_on(device))
    with pytest.raises(StageError, match="sleep_level is 0"):
        ColocatedCycle(engine, trainer, refit_on(device), sleep_level=0)
