"""Refits of real vLLM engines from real Megatron ranks: after a refit an engine is one that was started from the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm_checkpoints import dense_config, moe_config, read_checkpoint, write_checkpoint
from vllm_engines import GEN_RANKS, PROMPTS, TOKENS, Engine, Sampled, ScriptEngine, ServerEngine
from vllm_trainers import CONFIG, RANKS, Trainers

from rlrefit.integration.colocated import ColocatedCycle
from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitMismatch
from rlrefit.integration.records import RefitRecord
from rlrefit.integration.stage_memory import StageRecord
from rlrefit.integration.stages import StageRefused
from rlrefit.recipes.algorithms.divergence import generation_kl
from tests.stages.pool import TrainersElsewhere
from tests.vllm_processes import forked_engines

pytestmark = pytest.mark.timeout(600)

CONFIGS = {"qwen3": dense_config(tied=True), "qwen3-moe": moe_config(expert_size=32)}
ENGINES: dict[str, type[Engine]] = {"qwen3": ScriptEngine, "qwen3-moe": ServerEngine}


@dataclass
class Scene:
    """A trainer, and an engine that was started from what Bridge exported of the trainer's weights A.

    ``paths`` are the checkpoints A and B, both as Bridge exports them.
    """

    model: str
    trainers: Trainers
    engine: Engine
    paths: tuple[str, str]
    sampled_a: list[Sampled] = field(default_factory=list)
    digests_a: list[dict[str, str]] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    version: int = -1

    def digests(self) -> list[dict[str, str]]:
        return self.engine.call("refit_parameter_digests")

    def meet(self) -> None:
        """A new epoch."""
        rendezvous = self.trainers.do("open", self.model, GEN_RANKS)[0]
        joining = self.trainers.start("join", self.model, rendezvous)
        self.engine.init(rendezvous)
        assert {routes["bulk"] for routes in joining.result()} == {
            len(read_checkpoint(self.paths[0])) - self.misc
        }

    @property
    def misc(self) -> int:
        """Weights without a shard rule: the router of each layer."""
        return CONFIGS[self.model].num_hidden_layers if self.model == "qwen3-moe" else 0

    def send(self, index: int) -> Future[list[Any]]:
        """The trainer takes on A (0) or B (1) and sends it."""
        self.version += 1
        return self.trainers.start("refit", self.model, index, self.version)

    def refit(self, index: int) -> list[dict[str, Any]]:
        sending = self.send(index)
        records = self.engine.refit(self.version)
        assert all(isinstance(record, dict) for record in sending.result())
        return records

    def kl(self, sampled: list[Sampled], index: int) -> float:
        """Generation KL, in nats, of what the engine gave to ``PROMPTS``, with A (0) or B (1) in the trainer."""
        contexts = [prompt + found.tokens for prompt, found in zip(PROMPTS, sampled, strict=True)]
        ours = self.trainers.do("log_probs", self.model, index, contexts)[0]
        theirs = torch.tensor([found.logprobs for found in sampled])
        return generation_kl(torch.tensor([row[-TOKENS:] for row in ours]), theirs, torch.ones_like(theirs))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: tuple(str(write_checkpoint(root / f"{name}-{seed}", config, seed)) for seed in (1, 2))
        for name, config in CONFIGS.items()
    }


@pytest.fixture(scope="module")
def trainers(checkpoints: dict[str, tuple[str, str]]) -> Iterator[Trainers]:
    trainers = Trainers(checkpoints)
    yield trainers
    trainers.close()


@pytest.fixture(scope="module", params=list(CONFIGS))
def scene(
    request: pytest.FixtureRequest, trainers: Trainers, checkpoints: dict[str, tuple[str, str]]
) -> Iterator[Scene]:
    model, paths = request.param, checkpoints[request.param]
    for index, path in enumerate(paths):
        trainers.do("export", model, index, path)
    with pytest.MonkeyPatch.context() as patch, forked_engines():
        for key, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }.items():
            patch.setenv(key, value)
        started = Scene(model, trainers, ENGINES[model](paths[0]), paths)
        started.guarded = started.engine.call("probe_guarded")
        started.sampled_a, started.digests_a = started.engine.generate(), started.digests()
        started.meet()
        yield started
        started.engine.shutdown()
        trainers.do("close", model)


def test_weights_are_guarded_as_soon_as_they_are_loaded(scene: Scene):
    assert scene.guarded == [True] * GEN_RANKS


def test_refits_generate_as_the_engine_that_loaded_what_bridge_exported(scene: Scene):
    digests_b = None
    for turn in range(2):
        scene.refit(1)
        sampled_b = scene.engine.generate()
        assert [s.tokens for s in sampled_b] != [s.tokens for s in scene.sampled_a]
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        for held, before in zip(digests_b, scene.digests_a, strict=True):
            assert all(held[name] != before[name] for name in held)

        records = scene.refit(0)
        assert all(record["version"] == scene.version == scene.engine.version() for record in records)
        assert all(record["bytes_verified"] > 0 for record in records)
        assert scene.digests() == scene.digests_a, turn
        sampled = scene.engine.generate()
        assert [s.values() for s in sampled] == [s.values() for s in scene.sampled_a]
        assert {v for s in sampled for v in s.versions} == {scene.version}


def test_trainer_and_engine_give_equal_probabilities_to_what_the_engine_generates(scene: Scene):
    for index in (1, 0):
        scene.refit(index)
        sampled = scene.engine.generate()
        assert scene.kl(sampled, index) < 1e-3
        assert scene.kl(sampled, 1 - index) > 0.1


def test_the_same_weights_twice_change_nothing(scene: Scene):
    for _ in range(2):
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]


def test_prefixes_of_the_old_weights_are_not_used_after_a_refit(scene: Scene):
    scene.engine.generate()
    assert scene.engine.generate()[-1].cached > 0
    scene.refit(0)
    assert [s.cached for s in scene.engine.generate()] == [0] * len(PROMPTS)


def test_a_new_epoch_takes_the_trace_of_the_last_one(scene: Scene):
    before = scene.engine.call("probe_trace")
    scene.engine.close_refit()
    scene.meet()
    assert scene.engine.call("probe_trace") == before
    scene.refit(0)
    assert scene.digests() == scene.digests_a


def test_running_requests_go_on_with_the_new_weights(scene: Scene):
    """Each token after the refit is the one that the new weights give for all that stands before it."""
    scene.refit(0)
    first, tokens = scene.version, 40
    prompts = PROMPTS[:3]
    sending: list[Any] = []

    def turn(step: int) -> None:
        if step >= 4 and not sending:
            sending.append(scene.send(1))
            scene.engine.refit(scene.version, "keep")

    found = scene.engine.generate_through(turn, prompts, tokens)
    assert all(isinstance(record, dict) for record in sending[0].result())
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
    refits = iter(["one"])

    def turn(count: int) -> None:
        if count < 4 or not next(refits, ""):
            return
        with monkeypatch.context() as patch:
            release = scene.engine.hold_outputs(patch)
            time.sleep(0.1)  # tokens that nobody reads
            sending.append(scene.send(1))
            releasing = threading.Timer(1.0, release)
            releasing.start()
            scene.engine.refit(scene.version)
            releasing.join()

    [found] = scene.engine.generate_through(turn, PROMPTS[:1], tokens)
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


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_requests_that_may_not_go_on_hold_tokens_of_one_version(scene: Scene, mode: Any, reason: str):
    scene.refit(0)
    first = scene.version
    sending: list[Any] = []

    def turn(step: int) -> None:
        if step >= 3 and not sending:
            sending.append(scene.send(1))
            scene.engine.refit(scene.version, mode)

    found = scene.engine.generate_through(turn, PROMPTS[:2], 40)
    sending[0].result()
    assert [s.reason for s in found] == [reason] * 2
    assert {v for s in found for v in s.versions} == {first}
    assert scene.engine.generate(PROMPTS[:1])[0].versions == [scene.version] * TOKENS


def test_a_failing_refit_raises_the_workers_own_error_and_the_engine_serves_on(scene: Scene):
    scene.refit(0)
    sending = scene.trainers.start("refit", scene.model, 1, scene.version + 7)
    with pytest.raises(RefitMismatch, match="vLLM worker"):
        scene.engine.refit(scene.version + 1)
    assert all("RefitMismatch" in answer for answer in sending.result())
    assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]
    scene.meet()
    scene.refit(0)


def test_a_refit_that_fails_half_way_ends_the_requests_and_the_next_one_resumes(scene: Scene):
    scene.refit(0)
    tried: list[int] = []
    failed: list[Exception] = []

    def turn(step: int) -> None:
        if step >= 3 and not tried:
            tried.append(step)
            scene.engine.call("probe_fail_next")
            try:
                scene.engine.refit(scene.version + 1)
            except RefitError as error:
                failed.append(error)

    with pytest.raises(EngineDirty, match="died in the middle"):
        scene.engine.generate_through(turn, PROMPTS[:2], 60)
    assert isinstance(failed[0], PeerLost)
    for _ in range(2):
        with pytest.raises(EngineDirty, match="Refit again, which resumes it"):
            scene.engine.generate(PROMPTS[:1])
    scene.refit(0)
    assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]


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
    assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]


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


def test_weights_that_are_asleep_are_not_written_and_discarded_ones_not_served(scene: Scene):
    """The CPU has no sleep mode: the calls are vLLM's, its memory stays."""
    scene.refit(0)
    scene.engine.sleep(1)
    sending = scene.trainers.start("refit", scene.model, 1, scene.version + 1)
    with pytest.raises(RefitError, match=r"asleep.*wake_up\(tags=\['weights'\]\)"):
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
    assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]


def test_the_colocated_cycle_leads_an_engine_through_its_stages(scene: Scene):
    """Here too the memory stays where it is. An ``AsyncLLM`` is awaited in another thread than this one."""
    engine = scene.engine.sleeper()
    stages: list[StageRecord] = []
    cycle = ColocatedCycle(
        engine,
        TrainersElsewhere(),
        lambda version: [RefitRecord(**record) for record in scene.refit(version % 2)],
        on_stage=stages.append,
    )
    tried: list[int] = []

    def meanwhile(step: int) -> None:
        if not tried:
            tried.append(step)
            with pytest.raises(StageRefused, match="engine 0 has unfinished requests"):
                cycle.sleep()

    scene.engine.generate_through(meanwhile, tokens=60)
    assert tried
    for _ in range(2):
        version = scene.version + 1
        cycle.to_training()
        with pytest.raises(EngineDirty, match="sleep"):
            scene.engine.version()
        found = cycle.to_generation(version)
        assert {record.version for record in found} == {version} == {scene.engine.version()}
        assert all(record.stage_peaks["wake_kv_cache"] > 0 for record in found)
        assert (scene.digests() == scene.digests_a) == (version % 2 == 0)
        sampled = cycle.generate(lambda: scene.engine.generate(tokens=4))
        assert {v for s in sampled for v in s.versions} == {version}
    with pytest.raises(StageRefused, match="kv_cache is awake already"):
        engine.wake(["kv_cache"])
    assert [p.process for p in stages[-1].processes] == [f"engine rank {i}" for i in range(GEN_RANKS)]


def test_vllms_own_weight_transfer_calls_drive_a_refit_by_the_backends_name(scene: Scene):
    if not isinstance(scene.engine, ScriptEngine):
        return  # the other engine was started without the backend
    llm, trainers = scene.engine.llm, scene.trainers
    scene.engine.close_refit()
    with pytest.raises(Exception, match="no trainer has been met"):
        llm.update_weights({"update_info": {"version": 0}})
    rendezvous = trainers.do("open", scene.model, GEN_RANKS)[0]
    joining = trainers.start("join", scene.model, rendezvous)
    init = {"rendezvous": rendezvous, "first_rank": RANKS, "refit_config": CONFIG}
    llm.init_weight_transfer_engine({"init_info": init})
    joining.result()
    for index in (1, 0):
        sending = scene.send(index)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": scene.version}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        sending.result()
        assert scene.engine.version() == scene.version
        assert (scene.digests() == scene.digests_a) == (index == 0)
    assert [s.values() for s in scene.engine.generate()] == [s.values() for s in scene.sampled_a]
    llm.start_weight_update()
    with pytest.raises(Exception, match="without update_weights"):
        llm.finish_weight_update()
    # Every worker's answer was read: the next call gets its own.
    assert [len(digests) for digests in scene.digests()] == [len(digests) for digests in scene.digests_a]
    scene.engine.close_refit()
    scene.meet()


def test_raw_bytes_of_named_parameters_come_back_from_the_worker(scene: Scene):
    scene.refit(1)
    name = "model.layers.1.post_attention_layernorm.weight"
    expected = read_checkpoint(scene.paths[1])[name].view(torch.uint8).numpy().tobytes()
    assert all(got == {name: expected} for got in scene.engine.call("refit_parameter_bytes", [name]))


def test_the_trace_is_reported_by_route(scene: Scene):
    tensors = read_checkpoint(scene.paths[0])
    manifest = [(name, list(tensor.shape), "bfloat16") for name, tensor in tensors.items()]
    for report in scene.engine.call("refit_trace", manifest):
        assert report["bulk"]["model.norm.weight"] == "((0, 64),)"
        assert report["bulk"].keys() | report["misc"].keys() == tensors.keys()


def test_a_refit_gives_what_vllms_own_reload_gives(scene: Scene):
    """The last one: on the CPU, vLLM's reload leaves experts computing with copies."""
    scene.refit(1)
    digests_b = scene.digests()
    scene.engine.call("probe_poison")
    scene.engine.call("probe_engine_load", scene.paths[1])
    assert scene.digests() == digests_b
