"""The driver over an ``AsyncLLM`` that fails or is cut off in every way, without vLLM's processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm_driver_doubles import HELD, AsyncLlm, met, met_a_late_trainer, request_of, settled

from rlrefit.integration.errors import EngineDirty, RefitError


def test_prefixes_that_stay_held_end_the_requests_of_an_async_llm():
    async def scene() -> None:
        llm = AsyncLlm()
        driver = await met(llm)
        running = request_of(driver)
        await settled()
        llm.fails["reset_prefix_cache"] = HELD
        with pytest.raises(RefitError, match=r"cached prefixes of the old weights.*Failed to reset KV cache"):
            await driver.refit(7)
        for refused in (running, request_of(driver)):
            with pytest.raises(EngineDirty, match="Failed to reset KV cache"):
                await asyncio.wait_for(refused, 5)
        assert llm.paused
        llm.fails.clear()
        await driver.refit(8)
        assert not llm.paused
        served = request_of(driver)
        await settled()
        llm.finish("r")
        assert (await served).versions == ((8,),)

    asyncio.run(scene())


def test_a_refit_whose_caller_is_cancelled_ends_without_it_and_requests_wait_for_it(
    caplog: pytest.LogCaptureFixture,
):
    async def scene() -> None:
        llm = AsyncLlm()
        driver, trainer = await met_a_late_trainer(llm)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(7), 0.01)
        late = request_of(driver)
        await settled()
        assert llm.paused
        assert not llm.queues
        trainer.set()
        await settled()
        assert not llm.paused
        assert driver.version == 7 == await driver.serving_version()
        llm.finish("r")
        assert (await late).versions == ((7,),)

    asyncio.run(scene())
    assert "refit 7, whose caller was cancelled, has succeeded" in caplog.text


def test_a_refit_that_fails_after_its_caller_was_cancelled_is_told_to_requests_and_log(
    caplog: pytest.LogCaptureFixture,
):
    async def scene() -> None:
        llm = AsyncLlm()
        driver, trainer = await met_a_late_trainer(llm)
        running = request_of(driver)
        await settled()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(7), 0.01)
        llm.fails = dict.fromkeys(("refit", "refit_serving_version"), RefitError("no trainer came"))
        trainer.set()
        for refused in (running, request_of(driver)):
            with pytest.raises(EngineDirty, match="no trainer came"):
                await asyncio.wait_for(refused, 5)

    asyncio.run(scene())
    assert "refit 7, whose caller was cancelled, has failed: no trainer came" in caplog.text


def test_a_refit_that_waits_for_another_can_be_cancelled():
    async def scene() -> None:
        llm = AsyncLlm()
        driver, trainer = await met_a_late_trainer(llm)
        first = asyncio.create_task(driver.refit(7))
        await settled()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(8), 0.01)
        trainer.set()
        await first
        await settled()
        assert driver.version == 7 == llm.version

    asyncio.run(scene())


@pytest.mark.parametrize("stage", ["pause_generation", "refit"])
def test_an_async_llm_that_raises_what_is_not_ours_leaves_nobody_waiting(stage: str):
    async def scene() -> None:
        llm = AsyncLlm()
        driver = await met(llm)
        running = request_of(driver)
        await settled()
        llm.fails[stage] = RuntimeError("vLLM's own")
        with pytest.raises(RuntimeError, match="vLLM's own"):
            await driver.refit(7)
        if stage == "pause_generation":  # the old weights are whole: the engine serves on
            llm.finish("r")
            assert (await asyncio.wait_for(running, 5)).versions == ((-1,),)
            assert driver.version == 3
            return
        for refused in (running, request_of(driver)):
            with pytest.raises(EngineDirty, match="RuntimeError: vLLM's own"):
                await asyncio.wait_for(refused, 5)
        assert driver.version == 7 == llm.version

    asyncio.run(scene())


def test_an_async_llm_that_sleeps_in_part_is_refitted_and_neither_paused_anew_nor_resumed():
    """To pause, data-parallel replicas would take steps together, in memory that is not there."""

    async def scene() -> None:
        llm = AsyncLlm()
        driver = await met(llm)
        llm.paused, llm.asleep = True, ["kv_cache"]
        llm.fails["pause_generation"] = AssertionError("paused anew")
        for version in (7, 8):
            await driver.refit(version, mode="wait")
            assert driver.version == version == llm.version
            assert llm.paused

    asyncio.run(scene())


def test_an_engine_that_ends_in_its_first_refit_and_before_any_request_is_not_waited_for():
    llm = AsyncLlm()  # outside an event loop, where vLLM starts no reader of outputs
    llm.wait = asyncio.Event().wait

    async def scene() -> None:
        driver = await met(llm)
        refitting = asyncio.create_task(driver.refit(7))
        await settled()
        assert llm.paused
        llm.outputs_queue.put_nowait(RuntimeError("EngineDeadError"))
        with pytest.raises(RefitError, match="the engine ended"):
            await asyncio.wait_for(asyncio.shield(refitting), 5)
        with pytest.raises(EngineDirty, match="the engine ended"):
            await asyncio.wait_for(request_of(driver), 5)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("method", "answer", "text"),
    [
        ("refit_serving_version", [{"version": 2}], r"different versions: \[7, 2\]"),
        (
            "refit",
            [{"refit_error": {"type": "PeerLost", "text": "a replica's"}}],
            "worker 1: a replica's",
        ),
        ("reset_prefix_cache", False, "a part of its cache was not reset"),
    ],
)
def test_what_any_data_parallel_replica_answers_is_heard(method: str, answer: Any, text: str):
    async def scene() -> None:
        llm = AsyncLlm(replicas=2)
        driver = await met(llm)
        assert len(await driver.refit(7)) == 2
        llm.other_replicas[method] = answer
        with pytest.raises(RefitError, match=text):
            await (driver.serving_version() if method == "refit_serving_version" else driver.refit(8))

    asyncio.run(scene())
