"""Refits that fail: who hears of it, and how the engine serves on."""

from __future__ import annotations

import pytest
from vllm_engines import PROMPTS

from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitMismatch

from .scene import BY_A_SERVER, Scene


def test_a_failing_refit_raises_the_workers_own_error_and_the_engine_serves_on(scene: Scene):
    scene.refit(0)
    sending = scene.trainers.start("refit", scene.model, 1, scene.version + 7)
    with pytest.raises(RefitMismatch, match="vLLM worker"):
        scene.engine.refit(scene.version + 1)
    assert all("RefitMismatch" in answer for answer in sending.result())
    assert scene.serves_a()
    scene.meet()
    scene.refit(0)


def test_a_refit_that_fails_half_way_ends_the_requests_and_the_next_one_resumes(scene: Scene):
    scene.refit(0)
    failed: list[Exception] = []

    def act() -> None:
        scene.engine.call("probe_fail_next")
        try:
            scene.engine.refit(scene.version + 1)
        except RefitError as error:
            failed.append(error)

    with pytest.raises(EngineDirty, match="died in the middle"):
        scene.generate_and(act, 3, PROMPTS[:2], 60)
    assert isinstance(failed[0], PeerLost)
    for _ in range(2):
        with pytest.raises(EngineDirty, match="Refit again, which resumes it"):
            scene.engine.generate(PROMPTS[:1])
    scene.refit(0)
    assert scene.serves_a()


@BY_A_SERVER
def test_prefixes_that_vllm_keeps_leave_the_engine_paused(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """A KV connector's transfer may hold blocks, and vLLM raises then."""
    held = "Call to reset_prefix_cache method failed: Failed to reset KV cache"
    with monkeypatch.context() as patch:
        scene.engine.replace_utility(patch, "reset_prefix_cache", Exception(held))
        sending = scene.send(0)
        with pytest.raises(RefitError, match="KV connector"):
            scene.engine.refit(scene.version)
        sending.result()
    with pytest.raises(EngineDirty, match=f"{held}.*KV connector"):
        scene.engine.generate(PROMPTS[:1])
    scene.refit(0)
    assert scene.serves_a()
