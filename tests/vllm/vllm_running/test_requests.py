"""Requests that run, or wait to be read, as a refit begins."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from vllm import SamplingParams
from vllm_engines import PROMPTS, TOKENS, ScriptEngine, ServerEngine

from .scene import BY_A_SCRIPT, BY_A_SERVER, Scene


def test_running_requests_go_on_with_the_new_weights(scene: Scene):
    """Each token after the refit is the one that the new weights give for all that stands before it."""
    scene.refit(0)
    first, tokens = scene.version, 40
    prompts = PROMPTS[:3]
    found = scene.refit_in(1, "keep", 4, prompts, tokens)
    before = [s.versions.count(first) for s in found]
    assert all(0 < n < tokens for n in before)
    assert all(
        s.versions == [first] * n + [scene.version] * (tokens - n) for s, n in zip(found, before, strict=True)
    )
    # Token by token, what the new weights say: one request for each position, of one token.
    for sampled, prompt, n in zip(found, prompts, before, strict=True):
        contexts = [prompt + sampled.tokens[:position] for position in range(n, tokens)]
        expected = scene.engine.generate(contexts, 1)
        assert [e.tokens[0] for e in expected] == sampled.tokens[n:]
    scene.refit(0)
    for sampled, prompt, n in zip(found, prompts, before, strict=True):
        expected = scene.engine.generate([prompt + sampled.tokens[:position] for position in range(n)], 1)
        assert [e.tokens[0] for e in expected] == sampled.tokens[:n]


def test_outputs_that_wait_to_be_read_when_a_refit_begins_are_of_the_old_weights(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    if not isinstance(scene.engine, ServerEngine):
        return  # an LLM's driver reads them itself
    scene.refit(0)
    first, tokens = scene.version, 120
    sending: list[Any] = []

    def act() -> None:
        with monkeypatch.context() as patch:
            release = scene.engine.hold_outputs(patch)
            time.sleep(0.1)  # tokens that nobody reads
            sending.append(scene.send(1))
            releasing = threading.Timer(1.0, release)
            releasing.start()
            scene.engine.refit(scene.version)
            releasing.join()

    [found] = scene.generate_and(act, 4, PROMPTS[:1], tokens)
    sending[0].result()
    before = found.versions.count(first)
    assert 4 < before < tokens
    assert found.versions == [first] * before + [scene.version] * (tokens - before)
    # The last ones that tell the old version are the old weights', the next ones the new weights'.
    contexts = [PROMPTS[0] + found.tokens[:position] for position in range(before - 5, before + 5)]
    of_the_new = [s.tokens[0] for s in scene.engine.generate(contexts, 1)]
    scene.refit(0)
    of_the_old = [s.tokens[0] for s in scene.engine.generate(contexts, 1)]
    assert found.tokens[before - 5 : before + 5] == of_the_old[:5] + of_the_new[5:]
    assert of_the_old[:5] != of_the_new[:5]


@BY_A_SCRIPT
def test_requests_that_are_waited_for_hold_tokens_of_one_version(scene: Scene):
    _end_before_the_refit(scene, "wait", "length")


@BY_A_SERVER
def test_requests_that_are_aborted_hold_tokens_of_one_version(scene: Scene):
    _end_before_the_refit(scene, "abort", "abort")


def _end_before_the_refit(scene: Scene, mode: Any, reason: str) -> None:
    scene.refit(0)
    first = scene.version
    found = scene.refit_in(1, mode, 3, PROMPTS[:2], 40)
    assert [s.reason for s in found] == [reason] * 2
    assert {v for s in found for v in s.versions} == {first}
    assert scene.engine.generate(PROMPTS[:1])[0].versions == [scene.version] * TOKENS


def test_an_exception_between_steps_leaves_no_request_behind(scene: Scene):
    if not isinstance(scene.engine, ScriptEngine):
        return  # nothing of the caller's runs between an AsyncLLM's steps

    def turn(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError

    scene.refit(0)
    with pytest.raises(ZeroDivisionError):
        scene.engine.generate_through(turn)
    assert not scene.engine.llm.llm_engine.has_unfinished_requests()
    assert [s.tokens for s in scene.engine.generate()] == [s.tokens for s in scene.sampled_a]


def test_an_engine_that_is_seeded_again_draws_the_same_tokens_again(scene: Scene):
    if not isinstance(scene.engine, ScriptEngine):
        return  # recipes sample through an LLM
    scene.refit(0)
    # One request: what two draw of one generator depends on which of them comes first.
    sampled = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True, detokenize=False)

    def drawn(seed: int) -> list[int]:
        scene.engine.driver.seed(seed)
        [found] = scene.engine.driver.generate([{"prompt_token_ids": PROMPTS[0]}], sampled)
        return list(found.output.outputs[0].token_ids)

    first = drawn(3)
    assert drawn(4) != first
    assert drawn(3) == first
