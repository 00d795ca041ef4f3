"""The drivers over an engine that is not as it has to be, and an ``LLM`` that fails or is cut off, without vLLM's processes."""

from __future__ import annotations

import asyncio

import pytest
from vllm.config import KVTransferConfig
from vllm_driver_doubles import HELD, AsyncLlm, Engine, Llm, met

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver


@pytest.mark.parametrize("kind", [Llm, AsyncLlm])
def test_an_engine_without_our_workers_is_refused_at_once_with_the_argument_to_give(kind: type[Engine]):
    make = VllmDriver if kind is Llm else AsyncVllmDriver
    with pytest.raises(RefitError, match=f'without rlrefit\'s workers.*worker_extension_cls="{EXTENSION}"'):
        make(kind(extension=""))


def test_somebody_elses_workers_are_told_by_their_first_answer():
    absent = Exception(
        "Call to collective_rpc method failed: 'Worker' object has no attribute 'refit_asleep'"
    )
    llm = Llm("somebody.Elses")
    llm.fails["refit_asleep"] = absent
    with pytest.raises(RefitError, match=r"no attribute 'refit_asleep'.*driver\.EXTENSION"):
        VllmDriver(llm)

    async def meet() -> None:
        engine = AsyncLlm("somebody.Elses")
        engine.fails["refit_asleep"] = absent
        with pytest.raises(RefitError, match=r"no attribute 'refit_asleep'.*driver\.EXTENSION"):
            await met(engine)

    asyncio.run(meet())


@pytest.mark.parametrize("raised", [True, False])
def test_prefixes_that_stay_held_leave_an_llm_paused_until_a_refit_drops_them(raised: bool):
    llm = Llm()
    driver = VllmDriver(llm)
    driver.init_refit({}, 1, RefitConfig())
    told = "Failed to reset KV cache" if raised else "a part of its cache was not reset"
    if raised:
        llm.fails["reset_prefix_cache"] = HELD
    else:
        llm.resets = False
    for version in (7, 8):
        with pytest.raises(RefitError, match=rf"cached prefixes of the old weights.*{told}"):
            driver.refit(version)
        assert llm.paused
        with pytest.raises(EngineDirty, match=rf"{told}.*Refit again"):
            driver.generate(["x"], None)
    # Refits that fail before they write don't make those prefixes fresh.
    llm.commits, llm.fails["refit"] = False, RefitError("refused")
    with pytest.raises(RefitError, match="refused"):
        driver.refit(9)
    assert llm.paused
    assert driver.version == 8
    llm.commits = llm.resets = True
    llm.fails.clear()
    driver.refit(10)
    assert not llm.paused
    driver._require_usable()


@pytest.mark.parametrize("error", [ValueError("vLLM's own"), RefitError("ours"), KeyboardInterrupt()])
def test_a_refit_whose_answer_is_lost_leaves_an_llm_that_refuses(error: BaseException):
    llm = Llm()
    driver = VllmDriver(llm)
    driver.init_refit({}, 1, RefitConfig())
    llm.fails["refit"] = error  # after the worker has committed
    with pytest.raises(type(error)):
        driver.refit(7)
    with pytest.raises(
        EngineDirty, match="interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    ):
        driver.generate(["x"], None)
    if not isinstance(error, KeyboardInterrupt):
        assert llm.paused
        assert driver.version == 7 == driver.serving_version()
    llm.fails.clear()
    driver.refit(8)
    assert not llm.paused
    driver._require_usable()


@pytest.mark.parametrize("kind", [Llm, AsyncLlm])
def test_an_engine_whose_connector_would_serve_blocks_of_old_weights_is_refused_at_once(kind: type[Engine]):
    make, engine = VllmDriver if kind is Llm else AsyncVllmDriver, kind()
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    engine.vllm_config.kv_transfer_config = transfer
    with pytest.raises(RefitError, match="kv_transfer_config: OffloadingConnector does not drop"):
        make(engine)
