"""What a refit leaves: an engine that was started from the weights."""

from __future__ import annotations

import torch
from vllm_checkpoints import read_checkpoint
from vllm_engines import GEN_RANKS, PROMPTS

from .scene import BY_A_SCRIPT, BY_A_SERVER, Scene


def test_refits_generate_as_the_engine_that_loaded_what_bridge_exported(scene: Scene):
    assert scene.guarded == [True] * GEN_RANKS  # as soon as they were loaded
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
        assert scene.serves_a()
        assert {v for s in scene.engine.generate() for v in s.versions} == {scene.version}


@BY_A_SERVER
def test_trainer_and_engine_give_equal_probabilities_to_what_the_engine_generates(scene: Scene):
    for index in (1, 0):
        scene.refit(index)
        sampled = scene.engine.generate()
        assert scene.kl(sampled, index) < 1e-3
        assert scene.kl(sampled, 1 - index) > 0.1


@BY_A_SCRIPT
def test_what_differs_from_the_weights_before_makes_the_same_engine(scene: Scene):
    scene.meet(delta="always")
    for turn, index in enumerate((1, 0, 0, 1, 0)):
        records = scene.refit(index)
        assert [record["changed_share"] is not None for record in records] == [turn > 0] * GEN_RANKS
        if index:
            assert scene.kl(scene.engine.generate(), 1) < 1e-3
        else:
            assert scene.digests() == scene.digests_a
            assert scene.serves_a()
    scene.meet()


@BY_A_SERVER
def test_the_same_weights_twice_change_nothing(scene: Scene):
    for _ in range(2):
        scene.refit(0)
        assert scene.digests() == scene.digests_a


@BY_A_SERVER
def test_prefixes_of_the_old_weights_are_not_used_after_a_refit(scene: Scene):
    scene.engine.generate()
    assert scene.engine.generate()[-1].cached > 0
    scene.refit(0)
    assert [s.cached for s in scene.engine.generate()] == [0] * len(PROMPTS)


@BY_A_SERVER
def test_a_new_epoch_takes_the_trace_of_the_last_one(scene: Scene):
    before = scene.engine.call("probe_trace")
    scene.engine.close_refit()
    scene.meet()
    assert scene.engine.call("probe_trace") == before
    scene.refit(0)
    assert scene.digests() == scene.digests_a


@BY_A_SCRIPT
def test_raw_bytes_of_named_parameters_come_back_from_the_worker(scene: Scene):
    scene.refit(1)
    name = "model.layers.1.post_attention_layernorm.weight"
    expected = read_checkpoint(scene.paths[1])[name].view(torch.uint8).numpy().tobytes()
    assert all(got == {name: expected} for got in scene.engine.call("refit_parameter_bytes", [name]))


@BY_A_SERVER
def test_the_trace_is_reported_by_route(scene: Scene):
    tensors = read_checkpoint(scene.paths[0])
    manifest = [(name, list(tensor.shape), "bfloat16") for name, tensor in tensors.items()]
    for report in scene.engine.call("refit_trace", manifest):
        assert report["bulk"]["model.norm.weight"] == "((0, 64),)"
        assert report["bulk"].keys() | report["misc"].keys() == tensors.keys()
